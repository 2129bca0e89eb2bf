#pragma once

// Warp-level building blocks of the KDA kernels (sm_90a): matrix products of 16 x 8 x 16, fragment loads, asynchronous
// copies, named barriers. Lane l = 4 g + c of a warp, g in 0..7, c in 0..3.
//
//   A fragment, 16 rows x 16 (bf16, 4 registers)   a0: row g,   columns 2c, 2c+1     a1: row g + 8, the same columns
//                                                  a2: row g,   columns 2c+8, 2c+9   a3: row g + 8, those columns
//   B fragment, 16 x 8 columns (2 registers)       b0: rows 2c, 2c+1, column g       b1: rows 2c+8, 2c+9, column g
//   C fragment, 16 x 8 (fp32, 4 registers)         c0, c1: row g, columns 2c, 2c+1   c2, c3: row g + 8
//
// Two C fragments side by side are an A fragment after rounding (a0 = c0 c1, a1 = c2 c3 of the left one, a2, a3 of the
// right one); this keeps chains of products in registers.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace furlong::kda::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// c += a b, fp32 accumulation.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// c += a b with tf32 operands, 16 x 8 x 8. a0: row g, column c; a1: row g + 8; a2, a3: column c + 4. b0: row c,
/// column g; b1: row c + 4. The hardware drops the low 13 bits of a mantissa: round with to_tf32 first.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(y) : "f"(x));
  return y;
}

/// Four 8 x 8 blocks of 16-bit elements; lanes 8 m .. 8 m + 7 give the addresses of the rows of block m.
__device__ __forceinline__ void load_blocks(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// The same, each block transposed: lane (g, c) receives stored rows 2c, 2c+1 of column g.
__device__ __forceinline__ void load_blocks_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_blocks_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

/// bf16 pair, `low` in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

/// 2^x, 2 ulp; subnormal results become zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

/// 16 bytes from global to shared memory past L1; zeros if not `valid` (the address is then not read).
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/// Waits until at most `kPending` of this thread's youngest groups are still under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

/// Barrier `id` (1..15) among `threads` threads, a multiple of 32. An arrival does not wait: it publishes this thread's
/// earlier accesses to those that wait.
__device__ __forceinline__ void barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
/// As barrier_wait; true if any thread brought true.
__device__ __forceinline__ bool barrier_any(int id, int threads, bool mine) {
  int any;
  asm volatile(
      "{ .reg .pred p, q;\n"
      "  setp.ne.s32 p, %3, 0;\n"
      "  bar.red.or.pred q, %1, %2, p;\n"
      "  selp.s32 %0, 1, 0, q; }\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(mine))
      : "memory");
  return any != 0;
}

/// Publishes what this thread, and those that it met at a barrier, wrote before to whoever acquires the value.
__device__ __forceinline__ void store_release(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ int load_acquire(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed(int* flag, int value) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;\n" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ int load_relaxed(const int* flag) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Barriers in shared memory (mbarrier): a phase ends when all arrivals and all announced bytes have come.
__device__ __forceinline__ void phase_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void phase_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
/// One arrival, and `bytes` more to come by bulk_copy.
__device__ __forceinline__ void phase_announce(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
/// One arrival as soon as this thread's asynchronous copies so far are there.
__device__ __forceinline__ void phase_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}
/// Until the phase of this parity (0 for the first) has ended.
__device__ __forceinline__ void phase_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again_%=:\n"
      "  mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "  @!done bra again_%=; }\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
/// `bytes` (a multiple of 16) from global to shared memory by the copy engine, counted by `barrier`.
__device__ __forceinline__ void bulk_copy(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}
/// Between ordinary accesses that were waited for and the copy engine's of the same memory.
__device__ __forceinline__ void proxy_fence() {
  asm volatile("fence.proxy.async;\n" ::: "memory");
}

/// Byte offset of 16-byte piece `piece` of row `row` in a tile whose rows have `kRowBytes` (a multiple of 128): pieces
/// are permuted within 128 bytes so that the eight rows of a fragment load lie in different banks.
template <int kRowBytes>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  return static_cast<uint32_t>(row * kRowBytes + ((piece ^ (row & 7)) << 4));
}

}  // namespace furlong::kda::cuda
