#pragma once

// The part of a chunk that depends on the state, by one warpgroup. It holds S^T, [columns, 128 keys], as one or two
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

template <typename Shape, bool kMap>
struct Recurrence {
  static constexpr int kHalves = Shape::kColumns / 64;
  const Walk& walk;
  char* shared;
  int warp, lane;
  float state[kHalves][64];  // S^T, by 64 columns: C fragments of 16 columns x 8 keys, 16 of them

  __device__ Recurrence(const Walk& w, char* memory, int thread)
      : walk(w), shared(memory), warp(thread >> 5), lane(thread & 31) {}

  /// Calls visit(element, key, column) for the state elements of this lane; columns count within the block's.
  template <typename Visit>
  __device__ void each(Visit visit) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
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
  /// The block's columns of the unit matrix.
  __device__ void set_identity(int first_column) {
    each([&](float& s, int key, int column) { s = key == first_column + column ? 1.0f : 0.0f; });
  }

  __device__ void load_values(const char* stage, int half, float (&x)[16]) const {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t r[4];
      load_blocks_transposed(r, shared_address(stage + Shape::Ring::kValue) +
                                    value_at<Shape::kColumns>(16 * pair + (lane & 7) + ((lane >> 4) << 3),
                                                              8 * half + 2 * warp + ((lane >> 3) & 1)));
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

  // B operands, from the address of the stage / 16.
  /// 16 keys of a tile whose rows are those of the chunk.
  __device__ static uint64_t keys_of(uint32_t stage, int tile, int step) {
    return operand_at<16, 1024, 1>(stage + (tile + (step / 4) * kHalfTile + (step % 4) * 32) / 16);
  }
  /// 16 columns of T or P.
  __device__ static uint64_t square_of(uint32_t stage, int square, int step) {
    return operand_at<16, 512, 2>(stage + (square + step * 32) / 16);
  }
  /// 16 rows of the chunk, keys contiguous.
  __device__ static uint64_t rows_of(uint32_t stage, int tile, int step) {
    return operand_at<kHalfTile, 1024, 1>(stage + (tile + step * 2048) / 16);
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

  /// One chunk for 64 columns. `entering`: their state as an operand.
  __device__ void advance(const char* stage, int half, const uint32_t (&entering)[8][4], float (&out)[16]) {
    float x[16], pseudo[16];
    uint32_t operand[2][4];
    const uint32_t operands = shared_address(stage) / 16;
    load_values(stage, half, x);
    forget(stage, half);  // not while products are under way: the compiler would wait for them
    group_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) group_mma_32(x, entering[step], keys_of(operands, Stage::kKey, step), true);
    if (!kMap) {
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        group_mma_32(out, entering[step], keys_of(operands, Stage::kQuery, step), step > 0);
      }
    }
    group_commit();
    group_wait<0>();
    to_operand<2>(x, operand);
    group_fence();
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      group_mma_32(pseudo, operand[step], square_of(operands, Stage::kInverse, step), step > 0);
    }
    group_commit();
    group_wait<0>();
    to_operand<2>(pseudo, operand);
    group_fence();
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      group_mma_128_rows(state[half], operand[step], rows_of(operands, Stage::kWrite, step));
      if (!kMap) group_mma_32(out, operand[step], square_of(operands, Stage::kProbability, step), true);
    }
    group_commit();
    group_wait<0>();
  }

  /// Where a warp turns its 16 columns of the output into rows: one of the outputs on their way, or over the stage's
  /// values, which it has read.
  __device__ uint32_t turn_at(uint32_t rows, int half, int row, int piece) const {
    return rows + value_at<Shape::kColumns>(row, 8 * half + 2 * warp + piece);
  }
  __device__ void stage_output(uint32_t rows, int half, const float (&columns)[16]) const {
    uint32_t packed[2][4];
    to_operand<2>(columns, packed);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int row = 16 * pair + (lane & 7) + ((lane >> 4) << 3);
      store_blocks_transposed(turn_at(rows, half, row, lane >> 3 & 1), packed[pair]);
    }
  }
  /// This warp's columns, 16 of each half; `to` is the chunk's first row at the block's first column.
  __device__ void store_output(uint32_t from, char* to, int64_t row_bytes, int rows) const {
    __syncwarp();
    const int half = lane % 4 / 2, piece = lane & 1, first = lane / 4;
    to += (half * 8 + 2 * warp + piece) * 16;
#pragma unroll
    for (int i = 0; i < kChunk / 8; ++i) {
      const int row = i * 8 + first;
      const uint4 words = load_shared_16(turn_at(from, half, row, piece));
      if (row < rows) *reinterpret_cast<uint4*>(to + row * row_bytes) = words;
    }
  }

  __device__ void wait_full(int chunk, int slot) const {
    if constexpr (Shape::kPooled) {
      phase_wait(shared_address(shared) + Shape::kPhaseBase + slot * 16, chunk / Shape::kStages & 1);
    } else {
      barrier_wait(Shape::kFullBarrier + slot, 2 * kGroup);
    }
  }
  __device__ void arrive_empty(int chunk, int slot) const {
    if constexpr (Shape::kPooled) {
      __syncwarp();
      if (lane == 0) phase_arrive(shared_address(shared) + Shape::kPhaseBase + slot * 16 + 8);
    } else if (chunk + Shape::kStages < walk.chunks) {
      barrier_arrive(Shape::kEmptyBarrier + slot, 2 * kGroup);
    }
  }

  __device__ uint32_t output_phase(int chunk) const {
    return shared_address(shared) + Shape::kOutputPhaseBase + chunk % Shape::kOutputs * 16;
  }

  /// Chunk by chunk. `out` is the output row of the walk's first token at this block's first column. Pooled, other
  /// warps bring outputs to it (store_outputs).
  template <typename BeforeChunk>
  __device__ void run(char* out, int64_t row_bytes, BeforeChunk before_chunk) {
    for (int chunk = 0, slot = 0; chunk < walk.chunks; ++chunk, slot = slot + 1 == Shape::kStages ? 0 : slot + 1) {
      const char* stage = shared + slot * Shape::Ring::kBytes;
      uint32_t rows = shared_address(stage) + Shape::Ring::kValue;
      before_chunk(chunk);
      uint32_t entering[8][4];
      if (kHalves == 1) to_operand<8>(state[0], entering);
      wait_full(chunk, slot);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float columns[16];
        if (kHalves > 1) to_operand<8>(state[half], entering);
        advance(stage, half, entering, columns);
        if constexpr (Shape::kPooled && !kMap) {
          rows = shared_address(shared) + Shape::kOutputBase + chunk % Shape::kOutputs * kValueBytes<Shape::kColumns>;
          if (chunk >= Shape::kOutputs) phase_wait(output_phase(chunk) + 8, (chunk / Shape::kOutputs - 1) & 1);
        }
        if (!kMap) stage_output(rows, half, columns);
      }
      if constexpr (Shape::kPooled && !kMap) {
        __syncwarp();
        if (lane == 0) phase_arrive(output_phase(chunk));
      } else if (!kMap) {
        store_output(rows, out + static_cast<int64_t>(chunk) * kChunk * row_bytes, row_bytes,
                     min(kChunk, walk.tokens - chunk * kChunk));
      }
      arrive_empty(chunk, slot);
    }
  }
};

/// Stores what the recurrence computed, by Shape::kCarryThreads threads.
template <typename Shape>
__device__ void store_outputs(const Walk& walk, char* shared, char* out, int64_t row_bytes, int thread) {
  constexpr int kPieces = Shape::kColumns / 8, kRows = Shape::kCarryThreads / kPieces;  // of a row; rows at a time
  const int piece = thread % kPieces, first = thread / kPieces;
  out += first * row_bytes + piece * 16;
  for (int chunk = 0; chunk < walk.chunks; ++chunk, out += kChunk * row_bytes) {
    const int slot = chunk % Shape::kOutputs;
    const uint32_t full = shared_address(shared) + Shape::kOutputPhaseBase + slot * 16;
    const uint32_t from = shared_address(shared) + Shape::kOutputBase + slot * kValueBytes<Shape::kColumns>;
    phase_wait(full, chunk / Shape::kOutputs & 1);
#pragma unroll
    for (int row = 0; row < kChunk; row += kRows) {
      const uint4 words = load_shared_16(from + value_at<Shape::kColumns>(row + first, piece));
      if (row + first < walk.tokens - chunk * kChunk) *reinterpret_cast<uint4*>(out + row * row_bytes) = words;
    }
    __syncwarp();
    if (thread % 32 == 0) phase_arrive(full + 8);
  }
}

}  // namespace furlong::kda::cuda
