#pragma once

// Matrix products of a warpgroup (wgmma, sm_90a): D [64, n] += A [64, 16] B [16, n], A from registers, B from shared
// memory through a descriptor. Warp w of the warpgroup holds rows 16 w .. 16 w + 15 of A and D as A and C fragments of
// cuda/primitives.cuh, C fragments side by side.
//
// The products are asynchronous: group_fence before the first one that uses registers written since, group_commit after
// the last one of a batch, group_wait before registers of a batch are read or written. B's tiles were written by
// ordinary stores, so the writers call group_publish before the barrier that hands them over.

#include <cstdint>

#include "furlong/ops/kda/cuda/primitives.cuh"

namespace furlong::kda::cuda {

__device__ __forceinline__ void group_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void group_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void group_publish() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

/// Where B lies: `at`, the address in shared memory / 16. `kAlong`: bytes between 64-column blocks of a tile whose
/// columns of B are contiguous (else unused); `kAcross`: bytes between groups of eight stored rows; `kSwizzle`: 1 for
/// rows of 128 bytes, 2 for rows of 64. All but the sum of an address and a constant is known at compile time: products
/// leave one by one, each behind its descriptor's arithmetic.
template <int kAlong, int kAcross, int kSwizzle>
__device__ __forceinline__ uint64_t operand_at(uint32_t at) {
  constexpr uint32_t kHigh = static_cast<uint32_t>(kAcross >> 4) | static_cast<uint32_t>(kSwizzle) << 30;
  return static_cast<uint64_t>(kHigh) << 32 | (at + (static_cast<uint32_t>(kAlong >> 4) << 16));
}

/// n = 32; B stored as rows of its columns (k contiguous). `accumulate` false: D = A B.
__device__ __forceinline__ void group_mma_32(float (&d)[16], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{ .reg .pred p;\n"
      "  setp.ne.b32 p, %21, 0;\n"
      "  wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16\n"
      "  {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0; }\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

/// n = 128; B stored as its rows (columns contiguous, in blocks of 64).
__device__ __forceinline__ void group_mma_128_rows(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16\n"
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
      " {%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

}  // namespace furlong::kda::cuda
