#pragma once

namespace furlong {

/// The instruction set that Highway picks on this CPU for the kernels of this library, e.g. "AVX3_SPR".
const char* simd_target();

}  // namespace furlong
