#pragma once

// The instruction sets that the Highway kernels are compiled for; included before <hwy/foreach_target.h>.
// x86-64: SSE2, AVX2 and AVX-512 (each costs compile time, and the sets between them are hardly met any more). Builds
// under sanitizers take SSE2 and AVX2 only: AVX-512 differs in its vector length alone, and there it compiles for
// minutes.

#ifdef FURLONG_SANITIZED
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_AVX3)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
