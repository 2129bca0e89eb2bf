#pragma once

// The part of a chunk that depends on the state, by one warpgroup. It holds S^T, [128 columns, 128 keys], as two
// accumulators of 64 columns; all products are taken transposed, so that a result is the A operand of the next product
// without leaving the registers, and the 64 columns of one accumulator need nothing of the others (C = 32 rows of the
// chunk):
//
//   X^T [64, C]  = v^T + S^T (-k e^G)^T          V'^T = X^T T^T,  T = (I + A)^-1 diag(beta)
//   O^T [64, C]  = S^T (q e^G)^T + V'^T P^T
//   S^T [64, 128] = S^T diag(e^{G_end}) + V'^T (k e^{G_end - G})

#include "furlong/ops/kda/cuda/layout.cuh"
#include "furlong/ops/kda/cuda/warpgroup.cuh"

namespace furlong::kda::cuda {

template <bool kAnyGate, bool kMap>
struct Recurrence {
  using Shape = Layout<kAnyGate>;
  const Walk& walk;
  char* shared;
  int warp, lane;
  float state[2][64];  // S^T, by 64 columns: C fragments of 16 columns x 8 keys, 16 of them

  __device__ Recurrence(const Walk& w, char* memory, int thread)
      : walk(w), shared(memory), warp(thread >> 5), lane(thread & 31) {}

  /// Calls visit(element, key, column) for the state elements of this lane; columns count within the block's 128.
  template <typename Visit>
  __device__ void each(Visit visit) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 64; ++i)
        visit(state[half][i], i / 4 * 8 + (lane & 3) * 2 + (i & 1),
              half * 64 + warp * 16 + (lane >> 2) + ((i >> 1) & 1) * 8);
  }

  __device__ void clear() {
    each([](float& s, int, int) { s = 0.0f; });
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

  /// Row of the chunk and 16-byte piece of the value tile whose address this lane gives for fragments of rows
  /// 16 pair .. 16 pair + 15.
  __device__ uint32_t value_at(int half, int pair) const {
    return tile_at(16 * pair + (lane & 7) + ((lane >> 4) << 3), 8 * half + 2 * warp + ((lane >> 3) & 1));
  }

  __device__ void load_values(const char* stage, int half, float (&x)[16]) const {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t r[4];
      load_blocks_transposed(r, shared_address(stage + Stage::kValue) + value_at(half, pair));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = unpack_bf16(r[i]);
        x[pair * 8 + i * 2] = v.x;
        x[pair * 8 + i * 2 + 1] = v.y;
      }
    }
  }

  /// C fragments of 16 columns each to A operands.
  template <int kSteps>
  __device__ static void to_operand(const float (&x)[kSteps * 8], uint32_t (&a)[kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[step][i] = pack_bf16(x[step * 8 + i * 2], x[step * 8 + i * 2 + 1]);
  }

  /// 16 keys of a tile whose rows are those of the chunk.
  __device__ static uint64_t keys_of(const char* tile, int step) {
    return operand_at(shared_address(tile) + (step / 4) * kHalfTile + (step % 4) * 32, 16, 1024, 1);
  }
  /// 16 columns of T or P.
  __device__ static uint64_t square_of(const char* square, int step) {
    return operand_at(shared_address(square) + step * 32, 16, 512, 2);
  }
  /// 16 rows of the chunk, keys contiguous.
  __device__ static uint64_t rows_of(const char* tile, int step) {
    return operand_at(shared_address(tile) + step * 2048, kHalfTile, 1024, 1);
  }

  __device__ void forget(const char* stage, int half) {
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 decay = *reinterpret_cast<const float2*>(stage + Stage::kDecay + (n * 8 + (lane & 3) * 2) * 4);
      state[half][n * 4] *= decay.x;
      state[half][n * 4 + 1] *= decay.y;
      state[half][n * 4 + 2] *= decay.x;
      state[half][n * 4 + 3] *= decay.y;
    }
  }

  /// One chunk for 64 columns; the last batch of products is left under way.
  __device__ void advance(const char* stage, int half, float (&out)[16]) {
    float x[16], pseudo[16];
    uint32_t entering[8][4], operand[2][4];
    load_values(stage, half, x);
    to_operand<8>(state[half], entering);
    forget(stage, half);  // not while products are under way: the compiler would wait for them
    group_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) group_mma_32(x, entering[step], keys_of(stage + Stage::kKey, step), true);
    if (!kMap) {
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        group_mma_32(out, entering[step], keys_of(stage + Stage::kQuery, step), step > 0);
      }
    }
    group_commit();
    group_wait<0>();
    to_operand<2>(x, operand);
    group_fence();
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      group_mma_32(pseudo, operand[step], square_of(stage + Stage::kInverse, step), step > 0);
    }
    group_commit();
    group_wait<0>();
    to_operand<2>(pseudo, operand);
    group_fence();
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      group_mma_128_rows(state[half], operand[step], rows_of(stage + Stage::kWrite, step));
      if (!kMap) group_mma_32(out, operand[step], square_of(stage + Stage::kProbability, step), true);
    }
    group_commit();
    group_wait<0>();
  }

  /// Output columns of this warp through its part of the value tile, which nobody else reads.
  __device__ void stage_output(char* stage, int half, const float (&out)[16]) const {
    uint32_t packed[2][4];
    to_operand<2>(out, packed);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      store_blocks_transposed(shared_address(stage + Stage::kValue) + value_at(half, pair), packed[pair]);
    }
  }
  __device__ void store_output(const char* stage, char* to, int64_t row_bytes, int rows) const {
    __syncwarp();
    const int piece = 8 * ((lane >> 1) & 1) + 2 * warp + (lane & 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 8 + (lane >> 2);
      const uint4 words = *reinterpret_cast<const uint4*>(stage + Stage::kValue + tile_at(row, piece));
      if (row < rows) *reinterpret_cast<uint4*>(to + row * row_bytes + piece * 16) = words;
    }
  }

  /// Chunk by chunk. `out` is the output row of the walk's first token at this block's first column.
  template <typename BeforeChunk>
  __device__ void run(char* out, int64_t row_bytes, BeforeChunk before_chunk) {
    for (int chunk = 0, slot = 0; chunk < walk.chunks; ++chunk, slot = slot + 1 == Shape::kStages ? 0 : slot + 1) {
      char* stage = shared + slot * Stage::kBytes;
      before_chunk(chunk);
      barrier_wait(Shape::kFullBarrier + slot, 2 * kGroup);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float columns[16];
        advance(stage, half, columns);
        if (!kMap) stage_output(stage, half, columns);
      }
      if (!kMap) {
        store_output(stage, out + static_cast<int64_t>(chunk) * kChunk * row_bytes, row_bytes,
                     min(kChunk, walk.tokens - chunk * kChunk));
      }
      if (chunk + Shape::kStages < walk.chunks) barrier_arrive(Shape::kEmptyBarrier + slot, 2 * kGroup);
    }
  }
};

}  // namespace furlong::kda::cuda
