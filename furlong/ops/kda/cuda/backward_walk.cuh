#pragma once

// The two recurrences of the gradient. One block walks the chunks of one sequence and head for kSlice value columns,
// the state [D, kSlice] in registers. Forward from the initial state, backward from the gradient of the final state:
//
//   forward    w   = U - W S                      S   <- diag(exp(G_end)) S   + (k exp(G_end - G))^T w
//   backward   d_w = P^T d_out + k_end d_S        d_S <- diag(exp(G_end)) d_S - W^T d_w + (scale q exp(G))^T d_out
//
// Both are x = x + first S, S <- diag S + second^T x with (first, second) = (-W, k_end) or (k_end, -W). Two barriers a
// chunk; the next chunks' tiles travel meanwhile.

#include "furlong/ops/kda/cuda/backward_chunk.cuh"

namespace furlong::kda::cuda {

template <int kD, int kSlice, bool kReverse>
struct WalkShared {
  static constexpr int kStages = kReverse && kSlice == 128 ? 2 : 3;
  static constexpr int kWarpCols = kSlice == 128 ? 32 : 16;  // value columns of a warp
  static constexpr int kThreads = 128 * kSlice / kWarpCols;
  static constexpr int kTileBytes = 64 * kD * 2, kSliceBytes = 64 * kSlice * 2;
  static constexpr int kEnd = (kReverse ? 3 : 2) * kTileBytes + (kReverse ? 2 : 1) * kSliceBytes;
  static constexpr int kStage = kEnd + kD * 4;
  static constexpr int kState = kStages * kStage;
  static constexpr int kBytes = kState + kD * kSlice * 2;
};

/// b: right operands of kCols columns.
template <int kCols, int kSlice>
FURLONG_DEVICE void load_right(uint32_t (&b)[kCols / 16][4], const Tile<kSlice>& right, int k, int col, int lane) {
#pragma unroll
  for (int n = 0; n < kCols / 16; ++n) right.right(b[n], k, col + n * 16, lane);
}

/// Rows [row, row + 16 kTiles) of a slice's accumulators: acc += left^T right over 64 rows.
template <int kD, int kSlice, int kTiles, int kCols>
FURLONG_DEVICE void add_outer(float (&acc)[kTiles][kCols / 8][4], const Tile<kD>& left, const Tile<kSlice>& right,
                              int row, int col, int lane) {
#pragma unroll
  for (int k = 0; k < 64; k += 16) {
    uint32_t b[kCols / 16][4];
    load_right<kCols>(b, right, k, col, lane);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      uint32_t a[4];
      left.left_transposed(a, k, row + t * 16, lane);
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) multiply(acc[t][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
  }
}

template <int kD, int kSlice, bool kReverse>
FURLONG_KERNEL void FURLONG_BOUNDS((WalkShared<kD, kSlice, kReverse>::kThreads), 1)
    gradient_walk(const BackwardArgs args, const GradientWork work) {
  using Shared = WalkShared<kD, kSlice, kReverse>;
  constexpr int kTiles = kD / 64;  // 16-row tiles of the state a warp holds
  constexpr int kCols = Shared::kWarpCols, kThreads = Shared::kThreads;
  const int tid = thread_index(), lane = tid & 31, warp = tid >> 5, group = lane >> 2, quad = lane & 3;
  const int heads = static_cast<int>(args.in.heads);
  const int b = block_index_y() / heads, h = block_index_y() % heads;
  const int first_value = block_index_x() * kSlice, col = warp / 4 * kCols, state_row = warp % 4 * 16 * kTiles;
  const int64_t begin = args.in.offsets[b], length = args.in.offsets[b + 1] - begin;
  const int chunks = static_cast<int>((length + kGradientChunk - 1) / kGradientChunk);
  const int64_t first_slot = slot_of(begin, b, 0);
  const auto tile_of = [&](int step) { return (first_slot + (kReverse ? chunks - 1 - step : step)) * heads + h; };
  unsigned char* memory = shared_memory();
  const Tile<kSlice> state_tile{reinterpret_cast<bf16*>(memory + Shared::kState)};

  const auto stage_tile = [&](int step, int n) {
    return Tile<kD>{reinterpret_cast<bf16*>(memory + step % Shared::kStages * Shared::kStage + n * Shared::kTileBytes)};
  };
  const auto stage_slice = [&](int step, int n) {
    return Tile<kSlice>{reinterpret_cast<bf16*>(memory + step % Shared::kStages * Shared::kStage +
                                                (kReverse ? 3 : 2) * Shared::kTileBytes + n * Shared::kSliceBytes)};
  };
  const auto stage_end = [&](int step) {
    return reinterpret_cast<float*>(memory + step % Shared::kStages * Shared::kStage + Shared::kEnd);
  };
  const auto load = [&](int step) {
    if (step < chunks) {
      const int64_t tile = tile_of(step), at = tile * 64 * kD;
      const bf16* x = kReverse ? work.d_values : work.values;
      load_tile<64, kD, kThreads, kD>(stage_tile(step, 0), (kReverse ? work.k_end : work.minus_w) + at);
      load_tile<64, kD, kThreads, kD>(stage_tile(step, 1), (kReverse ? work.minus_w : work.k_end) + at);
      load_tile<64, kSlice, kThreads, kD>(stage_slice(step, 0), x + at + first_value);
      if (kReverse) {
        load_tile<64, kD, kThreads, kD>(stage_tile(step, 2), work.q_start + at);
        const int64_t first = static_cast<int64_t>(chunks - 1 - step) * kGradientChunk;
        const int rows = static_cast<int>(length - first < kGradientChunk ? length - first : kGradientChunk);
        const Rows& o = args.d_out_NHV;
        load_tile<64, kSlice, kThreads>(stage_slice(step, 1), bf16_rows(o, begin + first, h) + first_value,
                                        o.token_stride, rows);
      }
      if (tid < kD / 4) copy_async(stage_end(step) + tid * 4, work.end + tile * kD + tid * 4, true);
    }
    copy_commit();
  };

  float state[kTiles][kCols / 8][4];
  const auto for_state = [&](const auto& visit) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          visit(state_row + t * 16 + group + r * 8, col + n * 8 + quad * 2, state[t][n][2 * r], state[t][n][2 * r + 1]);
        }
      }
    }
  };
  const int64_t square = static_cast<int64_t>(block_index_y()) * kD * kD + first_value;
  const float* initial = kReverse ? args.d_final_state_BHKV : args.initial_state_BHKV;
  for_state([&](int d, int v, float& x, float& y) {
    const float2 pair = initial == nullptr ? float2{0, 0} : float_pair(initial + square + d * kD, v);
    x = pair.x;
    y = pair.y;
  });
  for (int step = 0; step < Shared::kStages - 1; ++step) load(step);

  for (int step = 0; step < chunks; ++step) {
    const int64_t tile = tile_of(step);
    for_state([&](int d, int v, float& x, float& y) { state_tile.word(d, v) = pack(x, y); });
    copy_wait<Shared::kStages - 2>();
    sync_block();
    load(step + Shared::kStages - 1);
    bf16* kept = (kReverse ? work.d_states : work.states) + tile * kD * kD + first_value;
    for (int piece = tid; piece < kD * kSlice / 8; piece += kThreads) {
      const int d = piece / (kSlice / 8), v = piece % (kSlice / 8) * 8;
      *reinterpret_cast<uint4*>(kept + d * kD + v) = *reinterpret_cast<const uint4*>(state_tile.at(d, v));
    }

    const Tile<kSlice> values = stage_slice(step, 0);
    const int row = warp % 4 * 16;
    float x[kCols / 8][4];
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 pair = unpack(values.word(row + group + r * 8, col + n * 8 + quad * 2));
        x[n][2 * r] = pair.x;
        x[n][2 * r + 1] = pair.y;
      }
    }
    const Tile<kD> first = stage_tile(step, 0);
#pragma unroll
    for (int k = 0; k < kD; k += 16) {
      uint32_t a[4], b[kCols / 16][4];
      first.left(a, row, k, lane);
      load_right<kCols>(b, state_tile, k, col, lane);
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) multiply(x[n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = row + group + r * 8, v = col + n * 8 + quad * 2;
        values.word(i, v) = pack(x[n][2 * r], x[n][2 * r + 1]);
      }
    }
    const float* end = stage_end(step);
    for_state([&](int d, int, float& y, float& z) {
      y *= end[d];
      z *= end[d];
    });
    if (kReverse)
      add_outer<kD, kSlice, kTiles, kCols>(state, stage_tile(step, 2), stage_slice(step, 1), state_row, col, lane);
    sync_block();
    bf16* values_out = (kReverse ? work.d_values : work.values) + tile * 64 * kD + first_value;
    for (int piece = tid; piece < 64 * kSlice / 8; piece += kThreads) {
      const int i = piece / (kSlice / 8), v = piece % (kSlice / 8) * 8;
      *reinterpret_cast<uint4*>(values_out + i * kD + v) = *reinterpret_cast<const uint4*>(values.at(i, v));
    }
    add_outer<kD, kSlice, kTiles, kCols>(state, stage_tile(step, 1), values, state_row, col, lane);
  }
  copy_wait<0>();
  if (kReverse && args.d_initial_state_BHKV != nullptr) {
    for_state([&](int d, int v, float& x, float& y) {
      *reinterpret_cast<float2*>(args.d_initial_state_BHKV + square + d * kD + v) = {x, y};
    });
  }
}

}  // namespace furlong::kda::cuda
