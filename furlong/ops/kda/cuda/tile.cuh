#pragma once

// Machine layer of the gradient kernels: tensor-core products, matrix loads, asynchronous copies, tiles in shared
// memory. With nvcc it is PTX; without, cuda/emulation.h runs the same kernels on the CPU.
//
// A product of 16 x 8 x 16 bf16 (mma.m16n8k16): lane l holds of the accumulator rows l / 4 and l / 4 + 8, columns
// 2 (l % 4) and the next one.

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#if !defined(__CUDACC__)
#include "furlong/ops/kda/cuda/emulation.h"
#define FURLONG_DEVICE inline
#define FURLONG_KERNEL inline
#define FURLONG_BOUNDS(threads, blocks)
#else
#include "furlong/ops/kda/cuda/primitives.cuh"
#define FURLONG_DEVICE __device__ __forceinline__
#define FURLONG_KERNEL __global__
#define FURLONG_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)

namespace furlong::kda::cuda {

FURLONG_DEVICE int thread_index() {
  return threadIdx.x;
}
FURLONG_DEVICE int block_index_x() {
  return blockIdx.x;
}
FURLONG_DEVICE int block_index_y() {
  return blockIdx.y;
}
FURLONG_DEVICE int grid_size_x() {
  return gridDim.x;
}
FURLONG_DEVICE int block_size_x() {
  return blockDim.x;
}
FURLONG_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char furlong_kda_shared[];
  return furlong_kda_shared;
}
FURLONG_DEVICE void sync_block() {
  __syncthreads();
}
FURLONG_DEVICE void sync_warp() {
  __syncwarp();
}
FURLONG_DEVICE float shuffle_xor(float x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
FURLONG_DEVICE uint32_t shuffle_xor_word(uint32_t x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
FURLONG_DEVICE bool warp_any(bool mine) {
  return __any_sync(0xffffffffu, mine);
}
/// 2^x; results below 2^-126 are zero.
FURLONG_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FURLONG_DEVICE float reciprocal(float x) {
  return reciprocal_approx(x);
}
FURLONG_DEVICE float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// Asks for the line of x to be brought to the L2.
FURLONG_DEVICE void prefetch(const void* x) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(x));
}
FURLONG_DEVICE void copy_async(void* shared, const void* global, bool valid) {
  copy_async_16(shared_address(shared), global, valid);
}
FURLONG_DEVICE void copy_commit() {
  copy_async_commit();
}
template <int kPending>
FURLONG_DEVICE void copy_wait() {
  copy_async_wait<kPending>();
}
template <bool kTransposed>
FURLONG_DEVICE void load_matrices(uint32_t (&r)[4], const void* row) {
  if constexpr (kTransposed) {
    load_blocks_transposed(r, shared_address(row));
  } else {
    load_blocks(r, shared_address(row));
  }
}
FURLONG_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_bf16(c, a, b0, b1);
}

}  // namespace furlong::kda::cuda
#endif

namespace furlong::kda::cuda {

using bf16 = __nv_bfloat16;

FURLONG_DEVICE uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
FURLONG_DEVICE float2 unpack(uint32_t word) {
  union {
    uint32_t bits;
    float value;
  } low, high;
  low.bits = word << 16;
  high.bits = word & 0xffff0000u;
  return {low.value, high.value};
}

/// Tile of kCols bf16 a row in shared memory, 16-byte pieces permuted inside a row so that eight rows of one piece
/// lie in different banks. kCols is 32, 64 or 128.
template <int kCols>
struct Tile {
  bf16* data;

  static constexpr int kPieces = kCols / 8;
  static FURLONG_DEVICE int place(int row, int col) {
    const int turn = kCols >= 64 ? row & 7 : (row >> 1) & 3;
    return row * kCols + ((((col >> 3) ^ turn)) << 3) + (col & 7);
  }
  FURLONG_DEVICE bf16* at(int row, int col) const { return data + place(row, col); }
  FURLONG_DEVICE uint32_t& word(int row, int col) const { return *reinterpret_cast<uint32_t*>(at(row, col)); }

  /// Left operand, rows [row, row + 16), contraction [col, col + 16).
  FURLONG_DEVICE void left(uint32_t (&a)[4], int row, int col, int lane) const {
    load_matrices<false>(a, at(row + (lane & 15), col + (lane >> 4) * 8));
  }
  /// The same of the transposed tile: rows are this tile's columns [col, col + 16), contraction over rows.
  FURLONG_DEVICE void left_transposed(uint32_t (&a)[4], int row, int col, int lane) const {
    load_matrices<true>(a, at(row + (lane & 7) + (lane >> 4) * 8, col + ((lane >> 3) & 1) * 8));
  }
  /// Right operand with this tile's rows as the contraction [row, row + 16), 16 columns from col: words 0, 1 for the
  /// first eight columns, 2, 3 for the others.
  FURLONG_DEVICE void right(uint32_t (&b)[4], int row, int col, int lane) const {
    load_matrices<true>(b, at(row + (lane & 15), col + (lane >> 4) * 8));
  }
  /// Right operand of the transposed tile: columns of the product are rows [row, row + 16), contraction
  /// [col, col + 16).
  FURLONG_DEVICE void right_transposed(uint32_t (&b)[4], int row, int col, int lane) const {
    load_matrices<false>(b, at(row + (lane & 7) + (lane >> 4) * 8, col + ((lane >> 3) & 1) * 8));
  }
};

/// [rows, kCols] floats in shared memory, 32-byte pieces permuted so that an accumulator's rows meet no bank twice.
template <int kCols>
struct FloatTile {
  float* data;
  FURLONG_DEVICE float2& at(int row, int col) const {
    return *reinterpret_cast<float2*>(data + row * kCols + (((col >> 3) ^ (row & 3)) << 3) + (col & 7));
  }
};

}  // namespace furlong::kda::cuda
