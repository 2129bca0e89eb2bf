#pragma once

// The part of a chunk that depends on the state, by four warps with 32 value columns each and no exchange between them.
// A warp holds S^T, [32 columns, 128 keys], as C fragments; all products are taken transposed, so that a result is the
// A operand of the next product without leaving the registers (shapes for one warp, C = 32 rows of the chunk):
//
//   X^T [32, C]  = v^T + S^T (-k e^G)^T          V'^T = X^T T^T,  T = (I + A)^-1 diag(beta)
//   O^T [32, C]  = S^T (q e^G)^T + V'^T P^T
//   S^T [32, 128] = S^T diag(e^{G_end}) + V'^T (k e^{G_end - G})

#include "furlong/ops/kda/cuda_layout.cuh"

namespace furlong::kda::cuda {

template <bool kMap, int kStages>
struct Recurrence {
  const Walk& walk;
  char* shared;
  int warp, lane;
  float state[2][16][4];  // S^T: 16 columns, 8 keys a tile

  __device__ Recurrence(const Walk& w, char* memory, int thread)
      : walk(w), shared(memory), warp(thread >> 5), lane(thread & 31) {}

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state[m][n][i] = 0.0f;
  }

  /// Calls visit(element, key, column) for the state elements of this lane; columns count within the block's 128.
  template <typename Visit>
  __device__ void each(Visit visit) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          visit(state[m][n][i], n * 8 + (lane & 3) * 2 + (i & 1), warp * 32 + m * 16 + (lane >> 2) + (i >> 1) * 8);
  }

  /// `matrix` is [128, row_length], already at this block's first column.
  __device__ void load_state(const float* matrix, int64_t row_length) {
    each([&](float& s, int key, int column) { s = matrix[key * row_length + column]; });
  }
  __device__ void store_state(float* matrix, int64_t row_length) {
    each([&](float& s, int key, int column) { matrix[key * row_length + column] = s; });
  }
  __device__ void set_identity() {
    each([&](float& s, int key, int column) { s = key == column ? 1.0f : 0.0f; });
  }

  /// Value columns of this warp as C fragments: x[m][n], 16 columns times 8 rows of the chunk.
  __device__ void load_values(const char* stage, float (&x)[2][4][4]) const {
    const uint32_t tile = shared_address(stage + Stage::kValue);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t r[4];
        load_blocks_transposed(r, tile + swizzled<kRowBytes>(value_row(pair), value_piece(m)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 v = unpack_bf16(r[i]);
          x[m][2 * pair + (i >> 1)][(i & 1) * 2] = v.x;
          x[m][2 * pair + (i >> 1)][(i & 1) * 2 + 1] = v.y;
        }
      }
  }
  __device__ int value_row(int pair) const { return 16 * pair + (lane & 7) + ((lane >> 4) << 3); }
  __device__ int value_piece(int m) const { return 4 * warp + 2 * m + ((lane >> 3) & 1); }

  /// C fragments to A operands: 32 columns x 16 rows of the chunk each.
  __device__ static void to_operand(const float (&x)[2][4][4], uint32_t (&a)[2][2][4]) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&tile)[4] = x[m][2 * step + (i >> 1)];
          a[m][step][i] = pack_bf16(tile[(i & 1) * 2], tile[(i & 1) * 2 + 1]);
        }
  }

  /// x += S^T key^T and, with outputs, out += S^T query^T.
  __device__ void read_state(const char* stage, float (&x)[2][4][4], float (&out)[2][4][4]) const {
    const int row = (lane & 7) + ((lane >> 4) << 3), bit = (lane >> 3) & 1;
    const uint32_t keys = shared_address(stage + Stage::kKey), queries = shared_address(stage + Stage::kQuery);
#pragma unroll
    for (int step = 0; step < kHead / 16; ++step) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&tile)[4] = state[m][2 * step + (i >> 1)];
          a[m][i] = pack_bf16(tile[(i & 1) * 2], tile[(i & 1) * 2 + 1]);
        }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const uint32_t at = swizzled<kRowBytes>(row + 16 * pair, 2 * step + bit);
        uint32_t b[4];
        load_blocks(b, keys + at);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_bf16(x[m][2 * pair], a[m], b[0], b[1]);
          mma_bf16(x[m][2 * pair + 1], a[m], b[2], b[3]);
        }
        if (!kMap) {
          load_blocks(b, queries + at);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            mma_bf16(out[m][2 * pair], a[m], b[0], b[1]);
            mma_bf16(out[m][2 * pair + 1], a[m], b[2], b[3]);
          }
        }
      }
    }
  }

  /// to += x L^T for a lower triangular L [C, C].
  __device__ void times_lower(const char* lower, const uint32_t (&x)[2][2][4], float (&to)[2][4][4]) const {
    const uint32_t base =
        shared_address(lower) + ((lane & 7) + ((lane >> 4) << 3)) * kSquareRow + ((lane >> 3) & 1) * 16;
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int pair = step; pair < 2; ++pair) {
        uint32_t b[4];
        load_blocks(b, base + pair * 16 * kSquareRow + step * 32);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_bf16(to[m][2 * pair], x[m][step], b[0], b[1]);
          mma_bf16(to[m][2 * pair + 1], x[m][step], b[2], b[3]);
        }
      }
  }

  __device__ void write_state(const char* stage, const uint32_t (&x)[2][2][4]) {
    const uint32_t writes = shared_address(stage + Stage::kWrite);
    const int row = (lane & 7) + (((lane >> 3) & 1) << 3);
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int n = 2 * pair + side;
        const float2 decay = *reinterpret_cast<const float2*>(stage + Stage::kDecay + (n * 8 + (lane & 3) * 2) * 4);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          state[m][n][0] *= decay.x;
          state[m][n][1] *= decay.y;
          state[m][n][2] *= decay.x;
          state[m][n][3] *= decay.y;
        }
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t b[4];
        load_blocks_transposed(b, writes + swizzled<kRowBytes>(row + 16 * step, 2 * pair + (lane >> 4)));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_bf16(state[m][2 * pair], x[m][step], b[0], b[1]);
          mma_bf16(state[m][2 * pair + 1], x[m][step], b[2], b[3]);
        }
      }
    }
  }

  /// Output rows through this warp's columns of the value tile, which nobody else reads.
  __device__ void store_output(char* stage, const float (&out)[2][4][4], char* to, int64_t row_bytes, int rows) const {
    const uint32_t tile = shared_address(stage + Stage::kValue);
    uint32_t packed[2][2][4];
    to_operand(out, packed);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        store_blocks_transposed(tile + swizzled<kRowBytes>(value_row(pair), value_piece(m)), packed[m][pair]);
      }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 8 + (lane >> 2), piece = 4 * warp + (lane & 3);
      const uint4 words = *reinterpret_cast<const uint4*>(stage + Stage::kValue + swizzled<kRowBytes>(row, piece));
      if (row < rows) *reinterpret_cast<uint4*>(to + row * row_bytes + piece * 16) = words;
    }
  }

  /// Chunk by chunk. `out` is the output row of the walk's first token at this block's first column.
  template <typename BeforeChunk>
  __device__ void run(char* out, int64_t row_bytes, BeforeChunk before_chunk) {
    for (int chunk = 0; chunk < walk.chunks; ++chunk) {
      const int slot = chunk % kStages;
      char* stage = shared + slot * Stage::kBytes;
      before_chunk(chunk);
      barrier_wait(kFullBarrier + slot, 2 * kGroup);
      float x[2][4][4], o[2][4][4] = {};
      uint32_t operand[2][2][4];
      load_values(stage, x);
      read_state(stage, x, o);
      to_operand(x, operand);
      float pseudo[2][4][4] = {};
      times_lower(stage + Stage::kInverse, operand, pseudo);
      to_operand(pseudo, operand);
      write_state(stage, operand);
      if (!kMap) {
        times_lower(stage + Stage::kProbability, operand, o);
        store_output(stage, o, out + static_cast<int64_t>(chunk) * kChunk * row_bytes, row_bytes,
                     min(kChunk, walk.tokens - chunk * kChunk));
      }
      if (chunk + kStages < walk.chunks) barrier_arrive(kEmptyBarrier + slot, 2 * kGroup);
    }
  }
};

}  // namespace furlong::kda::cuda
