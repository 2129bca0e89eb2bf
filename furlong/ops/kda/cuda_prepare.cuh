#pragma once

// The part of a chunk that does not depend on the state, by one group of four warps.
//
// G_i = sum of decay_log up to row i, in base 2. With the reference r = G_15 (end of the first 16 rows), the factors
// 2^{G_i - r} and 2^{r - G_j} of a gate bounded by -5 stay within 2^{+-115.5}, so the scores of all 32 rows are plain
// matrix products of bf16 operands:
//   A_ij = beta_i (k_i 2^{G_i - r}) . (k_j 2^{r - G_j}),  P_ij = (q_i 2^{G_i - r}) . (k_j 2^{r - G_j})
// A chunk in which a channel forgets more in 16 rows takes its scores pair by pair with exponents G_i - G_j <= 0.
// What meets the state has factors of at most one: q 2^G, k 2^G, k 2^{G_end - G}.

#include "furlong/ops/kda/cuda_layout.cuh"

namespace furlong::kda::cuda {

inline constexpr float kSafeLog2 = 120.0f;     // 16 rows may forget 2^-120
inline constexpr float kLowestLog2 = -150.0f;  // 2^-150 is zero in fp32

/// Constants of the gate for one channel.
struct GateChannel {
  float slope, offset;
};

__device__ __forceinline__ GateChannel gate_channel(const Inputs& in, int head, int channel) {
  if (in.gate_form == GateForm::kGiven) return {1.0f, 0.0f};
  const float bias = in.dt_bias_HK[static_cast<int64_t>(head) * kHead + channel];
  if (in.gate_form == GateForm::kSoftplus) return {-expf(in.a_log_H[head]) * kLog2E, bias};
  const float slope = -expf(in.a_log_H[head]) * kLog2E;
  return {slope, slope * bias};
}

/// decay_log / ln 2 of one input.
template <bool kAnyGate>
__device__ __forceinline__ float gate_log2(GateForm form, float lower_bound_log2, GateChannel channel, float z) {
  if (!kAnyGate || form == GateForm::kBounded) {
    return lower_bound_log2 * reciprocal_approx(1.0f + exp2_approx(fmaf(z, channel.slope, channel.offset)));
  }
  if (form == GateForm::kGiven) return fmaxf(z * kLog2E, kLowestLog2);
  const float x = z + channel.offset;
  return fmaxf(channel.slope * (x > 20.0f ? x : log1pf(expf(x))), kLowestLog2);
}

__device__ __forceinline__ float load_element(const void* data, int64_t index, Element type) {
  return type == Element::kFloat ? static_cast<const float*>(data)[index]
                                 : __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
}

/// Asynchronous copy of rows of `kBytes` bytes into a swizzled tile; rows from `valid_rows` on become zero.
template <int kBytes>
__device__ __forceinline__ void copy_rows(char* tile, const char* source, int64_t stride_bytes, int valid_rows,
                                          int thread) {
  constexpr int kPieces = kBytes / 16;
  const uint32_t base = shared_address(tile);
#pragma unroll
  for (int i = 0; i < kChunk * kPieces / kGroup; ++i) {
    const int item = i * kGroup + thread, row = item / kPieces, piece = item % kPieces;
    const bool valid = row < valid_rows;
    copy_async_16(base + swizzled<kBytes>(row, piece), source + (valid ? row : 0) * stride_bytes + piece * 16, valid);
  }
}

template <bool kAnyGate, bool kMap>
struct Preparer {
  using Shape = Layout<kAnyGate>;
  const Inputs& in;
  const Walk& walk;
  char* shared;
  int group, thread, warp, lane, block, column;  // this thread's 16 rows and first of two channels
  float lower_bound_log2;
  GateChannel gate0, gate1;
  float gx[16], gy[16];  // sums of gates within the 16 rows

  __device__ Preparer(const Inputs& inputs, const Walk& w, char* memory, int group_index, int thread_index)
      : in(inputs), walk(w), shared(memory), group(group_index), thread(thread_index) {
    warp = thread >> 5;
    lane = thread & 31;
    block = warp >> 1;
    column = (warp & 1) * 64 + lane * 2;
    lower_bound_log2 = in.lower_bound * kLog2E;
    gate0 = gate_channel(in, walk.head, column);
    gate1 = gate_channel(in, walk.head, column + 1);
  }

  __device__ char* input(int local) const {
    return shared + Shape::kInputBase + (group * 2 + (local & 1)) * Shape::kInputBytes;
  }
  __device__ char* scratch() const { return shared + Shape::kScratchBase + group * Scratch::kBytes; }
  __device__ int rows_left(int chunk) const { return min(kChunk, walk.tokens - chunk * kChunk); }

  __device__ const char* row_pointer(const Rows& rows, int chunk) const {
    const int64_t size = rows.type == Element::kFloat ? 4 : 2;
    return static_cast<const char*>(rows.data) +
           ((walk.first_token + static_cast<int64_t>(chunk) * kChunk) * rows.token_stride +
            walk.head * rows.head_stride) *
               size;
  }

  __device__ void load_inputs(int chunk, int local) const {
    if (chunk < walk.chunks) {
      char* to = input(local);
      const int rows = rows_left(chunk);
      if (!kMap) {
        copy_rows<kRowBytes>(to + Shape::kInputQuery, row_pointer(in.q_NHK, chunk), in.q_NHK.token_stride * 2, rows,
                             thread);
      }
      copy_rows<kRowBytes>(to + Shape::kInputKey, row_pointer(in.k_NHK, chunk), in.k_NHK.token_stride * 2, rows,
                           thread);
      const char* gate = row_pointer(in.gate_NHK, chunk);
      if (kAnyGate && in.gate_NHK.type == Element::kFloat) {
        copy_rows<kHead * 4>(to + Shape::kInputGate, gate, in.gate_NHK.token_stride * 4, rows, thread);
      } else {
        copy_rows<kRowBytes>(to + Shape::kInputGate, gate, in.gate_NHK.token_stride * 2, rows, thread);
      }
    }
    copy_async_commit();
  }

  __device__ void load_values(int chunk, char* stage, bool zero) const {
    const char* source = row_pointer(in.v_NHV, chunk) + walk.slice * kRowBytes;
    copy_rows<kRowBytes>(stage + Stage::kValue, zero ? row_pointer(in.v_NHV, chunk) : source, in.v_NHV.token_stride * 2,
                         zero ? 0 : rows_left(chunk), thread);
    copy_async_commit();
  }

  __device__ float load_beta(int chunk) const {
    if (thread >= rows_left(chunk)) return 0.0f;
    const int64_t row = walk.first_token + static_cast<int64_t>(chunk) * kChunk + thread;
    const float beta = load_element(in.beta_NH.data, row * in.beta_NH.token_stride + walk.head * in.beta_NH.head_stride,
                                    in.beta_NH.type);
    return in.beta_is_logit ? 1.0f / (1.0f + expf(-beta)) : beta;
  }

  /// Factors of the rows of q (with `scale`) and k.
  __device__ void norms(const char* from) const {
    float* factors = reinterpret_cast<float*>(scratch() + Scratch::kNorms);
#pragma unroll
    for (int i = kMap ? 4 : 0; i < 8; ++i) {
      const int vector = i * 8 + warp * 2 + (lane >> 4);
      const bool is_key = i >= 4;
      float sum = 0.0f;
      if (in.l2_norm) {
        const char* tile = from + (is_key ? Shape::kInputKey : Shape::kInputQuery);
        const uint4 words = *reinterpret_cast<const uint4*>(tile + swizzled<kRowBytes>(vector & 31, lane & 15));
        for (const uint32_t pair : {words.x, words.y, words.z, words.w}) {
          const float2 x = unpack_bf16(pair);
          sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
        }
#pragma unroll
        for (int distance = 8; distance > 0; distance >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        sum = rsqrtf(sum + in.l2_eps);
      } else {
        sum = 1.0f;
      }
      if ((lane & 15) == 0) factors[vector] = is_key ? sum : sum * in.scale;
    }
  }

  /// Sums of gates within this thread's 16 rows; the last one goes to `Scratch::kTotals`.
  __device__ void gates(const char* from, int rows) {
    const bool wide = kAnyGate && in.gate_NHK.type == Element::kFloat;
    const char* tile = from + Shape::kInputGate;
    float sum_x = 0.0f, sum_y = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = block * 16 + i;
      float2 z;
      if (wide) {
        z = *reinterpret_cast<const float2*>(tile + swizzled<kHead * 4>(row, column >> 2) + (column & 3) * 4);
      } else {
        z = unpack_bf16(
            *reinterpret_cast<const uint32_t*>(tile + swizzled<kRowBytes>(row, column >> 3) + (column & 7) * 2));
      }
      const bool valid = row < rows;
      sum_x += valid ? gate_log2<kAnyGate>(in.gate_form, lower_bound_log2, gate0, z.x) : 0.0f;
      sum_y += valid ? gate_log2<kAnyGate>(in.gate_form, lower_bound_log2, gate1, z.y) : 0.0f;
      gx[i] = sum_x;
      gy[i] = sum_y;
    }
    float* totals = reinterpret_cast<float*>(scratch() + Scratch::kTotals) + block * kHead + column;
    *reinterpret_cast<float2*>(totals) = make_float2(sum_x, sum_y);
  }

  /// Operands of the scores in place of the inputs, operands of the recurrence into the stage.
  __device__ void operands(char* from, char* stage) const {
    const float* totals = reinterpret_cast<const float*>(scratch() + Scratch::kTotals) + column;
    const float* factors = reinterpret_cast<const float*>(scratch() + Scratch::kNorms);
    const float2 first = *reinterpret_cast<const float2*>(totals);
    const float2 second = *reinterpret_cast<const float2*>(totals + kHead);
    const float enter_x = exp2_approx(first.x), enter_y = exp2_approx(first.y);
    const float leave_x = exp2_approx(second.x), leave_y = exp2_approx(second.y);
    const float shift_x = block == 0 ? first.x : 0.0f, shift_y = block == 0 ? first.y : 0.0f;
    if (block == 0) {
      *reinterpret_cast<float2*>(stage + Stage::kDecay + column * 4) =
          make_float2(enter_x * leave_x, enter_y * leave_y);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = block * 16 + i;
      const uint32_t at = swizzled<kRowBytes>(row, column >> 3) + (column & 7) * 2;
      const auto pair_at = [&](char* base) -> uint32_t& { return *reinterpret_cast<uint32_t*>(base + at); };
      const float dx = gx[i] - shift_x, dy = gy[i] - shift_y;
      const float ax = exp2_approx(dx), ay = exp2_approx(dy), bx = exp2_approx(-dx), by = exp2_approx(-dy);
      const float2 k_raw = unpack_bf16(pair_at(from + Shape::kInputKey));
      const float k_factor = factors[kChunk + row];
      const float kx = k_raw.x * k_factor, ky = k_raw.y * k_factor;
      const float kax = kx * ax, kay = ky * ay, kbx = kx * bx, kby = ky * by;
      pair_at(from + Shape::kInputKey) = pack_bf16(kax, kay);
      pair_at(from + Shape::kInputGate) = pack_bf16(kbx, kby);
      pair_at(stage + Stage::kKey) = pack_bf16(-kax * enter_x, -kay * enter_y);
      pair_at(stage + Stage::kWrite) = pack_bf16(kbx * leave_x, kby * leave_y);
      if (!kMap) {
        const float2 q_raw = unpack_bf16(pair_at(from + Shape::kInputQuery));
        const float q_factor = factors[row];
        const float qax = q_raw.x * q_factor * ax, qay = q_raw.y * q_factor * ay;
        pair_at(from + Shape::kInputQuery) = pack_bf16(qax, qay);
        pair_at(stage + Stage::kQuery) = pack_bf16(qax * enter_x, qay * enter_y);
      }
    }
  }

  /// The same for a chunk with a gate too strong for one reference: normalised q and k stay in place, G goes to the
  /// gate input's place in fp32.
  __device__ void operands_strong(char* from, char* stage) const {
    const float* totals = reinterpret_cast<const float*>(scratch() + Scratch::kTotals) + column;
    const float* factors = reinterpret_cast<const float*>(scratch() + Scratch::kNorms);
    const float2 first = *reinterpret_cast<const float2*>(totals);
    const float2 second = *reinterpret_cast<const float2*>(totals + kHead);
    const float before_x = block == 0 ? 0.0f : first.x, before_y = block == 0 ? 0.0f : first.y;
    if (block == 0) {
      *reinterpret_cast<float2*>(stage + Stage::kDecay + column * 4) =
          make_float2(exp2_approx(first.x + second.x), exp2_approx(first.y + second.y));
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = block * 16 + i;
      const uint32_t at = swizzled<kRowBytes>(row, column >> 3) + (column & 7) * 2;
      const auto pair_at = [&](char* base) -> uint32_t& { return *reinterpret_cast<uint32_t*>(base + at); };
      const float sum_x = before_x + gx[i], sum_y = before_y + gy[i];
      *reinterpret_cast<float2*>(from + Shape::kInputGate + swizzled<kHead * 4>(row, column >> 2) + (column & 3) * 4) =
          make_float2(sum_x, sum_y);
      const float rest_x = block == 0 ? first.x - gx[i] + second.x : second.x - gx[i];
      const float rest_y = block == 0 ? first.y - gy[i] + second.y : second.y - gy[i];
      const float2 k_raw = unpack_bf16(pair_at(from + Shape::kInputKey));
      const float kx = k_raw.x * factors[kChunk + row], ky = k_raw.y * factors[kChunk + row];
      const float ex = exp2_approx(sum_x), ey = exp2_approx(sum_y);
      pair_at(from + Shape::kInputKey) = pack_bf16(kx, ky);
      pair_at(stage + Stage::kKey) = pack_bf16(-kx * ex, -ky * ey);
      pair_at(stage + Stage::kWrite) = pack_bf16(kx * exp2_approx(rest_x), ky * exp2_approx(rest_y));
      if (!kMap) {
        const float2 q_raw = unpack_bf16(pair_at(from + Shape::kInputQuery));
        const float qx = q_raw.x * factors[row], qy = q_raw.y * factors[row];
        pair_at(from + Shape::kInputQuery) = pack_bf16(qx, qy);
        pair_at(stage + Stage::kQuery) = pack_bf16(qx * ex, qy * ey);
      }
    }
  }

  __device__ void put_score(char* stage, int row, int col, float left, float right, bool is_query) const {
    if (is_query) {
      *reinterpret_cast<uint32_t*>(stage + Stage::kProbability + row * kSquareRow + col * 2) =
          pack_bf16(col <= row ? left : 0.0f, col + 1 <= row ? right : 0.0f);
    } else {
      const float beta = reinterpret_cast<const float*>(stage + Stage::kBeta)[row];
      float* scores = reinterpret_cast<float*>(scratch() + Scratch::kScores);
      *reinterpret_cast<float2*>(scores + row * kScoreRow + col) =
          make_float2(col < row ? left * beta : 0.0f, col + 1 < row ? right * beta : 0.0f);
    }
  }

  /// Rows 16 m .. 16 m + 15, columns 8 n .. 8 (n + kTiles) - 1 of A or P.
  template <int kTiles>
  __device__ void score_tiles(const char* from, char* stage, int m, int n, bool is_query) const {
    const uint32_t rows_tile = shared_address(from + (is_query ? Shape::kInputQuery : Shape::kInputKey));
    const uint32_t columns_tile = shared_address(from + Shape::kInputGate);
    const int row_a = m * 16 + (lane & 15), row_b = n * 8 + (lane & 7) + ((lane >> 4) << 3);
    float sums[kTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kHead / 16; ++step) {
      uint32_t a[4];
      load_blocks(a, rows_tile + swizzled<kRowBytes>(row_a, 2 * step + (lane >> 4)));
#pragma unroll
      for (int pair = 0; pair < kTiles / 2; ++pair) {
        uint32_t b[4];
        load_blocks(b, columns_tile + swizzled<kRowBytes>(row_b + pair * 16, 2 * step + ((lane >> 3) & 1)));
        mma_bf16(sums[2 * pair], a, b[0], b[1]);
        mma_bf16(sums[2 * pair + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = m * 16 + (lane >> 2), col = (n + tile) * 8 + (lane & 3) * 2;
      put_score(stage, row, col, sums[tile][0], sums[tile][1], is_query);
      put_score(stage, row + 8, col, sums[tile][2], sums[tile][3], is_query);
    }
  }

  /// The upper right quarters of A and P are neither written nor read.
  __device__ void scores(const char* from, char* stage) const {
    if (kMap) {
      if (warp < 2) score_tiles<2>(from, stage, 1, 2 * warp, false);
      if (warp == 2) score_tiles<2>(from, stage, 0, 0, false);
    } else if (warp < 2) {
      score_tiles<4>(from, stage, 1, 0, warp == 1);
    } else {
      score_tiles<2>(from, stage, 0, 0, warp == 3);
    }
  }

  /// A and P pair by pair: lane = column, a warp takes every fourth row.
  __device__ void scores_strong(const char* from, char* stage) const {
    for (int row = warp; row < kChunk; row += 4) {
      float a = 0.0f, p = 0.0f;
      if (lane <= row) {
        for (int d = 0; d < kHead; d += 2) {
          const auto word = [&](int tile, int r) {
            return unpack_bf16(
                *reinterpret_cast<const uint32_t*>(from + tile + swizzled<kRowBytes>(r, d >> 3) + (d & 7) * 2));
          };
          const auto sum = [&](int r) {
            return *reinterpret_cast<const float2*>(from + Shape::kInputGate + swizzled<kHead * 4>(r, d >> 2) +
                                                    (d & 3) * 4);
          };
          const float2 g_row = sum(row), g_col = sum(lane), k_col = word(Shape::kInputKey, lane);
          const float x = k_col.x * exp2_approx(g_row.x - g_col.x), y = k_col.y * exp2_approx(g_row.y - g_col.y);
          const float2 k_row = word(Shape::kInputKey, row);
          a = fmaf(k_row.x, x, fmaf(k_row.y, y, a));
          if (!kMap) {
            const float2 q_row = word(Shape::kInputQuery, row);
            p = fmaf(q_row.x, x, fmaf(q_row.y, y, p));
          }
        }
      }
      const float beta = reinterpret_cast<const float*>(stage + Stage::kBeta)[row];
      reinterpret_cast<float*>(scratch() + Scratch::kScores)[row * kScoreRow + lane] = lane < row ? a * beta : 0.0f;
      *reinterpret_cast<__nv_bfloat16*>(stage + Stage::kProbability + row * kSquareRow + lane * 2) =
          __float2bfloat16(p);
    }
  }

  /// (I + A)^-1 diag(beta) by forward substitution in fp32, lane = column; one warp.
  __device__ void invert(char* stage) const {
    const float* scores = reinterpret_cast<const float*>(scratch() + Scratch::kScores);
    const float beta = reinterpret_cast<const float*>(stage + Stage::kBeta)[lane];
    float x[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float even = lane == i ? 1.0f : 0.0f, odd = 0.0f;
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 a = *reinterpret_cast<const float4*>(scores + i * kScoreRow + j);
        even = fmaf(-a.x, x[j], even);
        if (j + 1 < i) odd = fmaf(-a.y, x[j + 1], odd);
        if (j + 2 < i) even = fmaf(-a.z, x[j + 2], even);
        if (j + 3 < i) odd = fmaf(-a.w, x[j + 3], odd);
      }
      x[i] = even + odd;
      *reinterpret_cast<__nv_bfloat16*>(stage + Stage::kInverse + i * kSquareRow + lane * 2) =
          __float2bfloat16(x[i] * beta);
    }
  }

  /// All chunks of this group. `zero_values`: v counts as zero.
  __device__ void run(bool zero_values) {
    load_inputs(group, 0);
    for (int chunk = group, local = 0; chunk < walk.chunks; chunk += 2, ++local) {
      load_inputs(chunk + 2, local + 1);
      const float beta = load_beta(chunk);
      const int slot = chunk % Shape::kStages;
      char* stage = shared + Shape::kStageBase + slot * Stage::kBytes;
      char* from = input(local);
      if (chunk >= Shape::kStages) barrier_wait(kEmptyBarrier + slot, 2 * kGroup);
      load_values(chunk, stage, zero_values);
      copy_async_wait<2>();
      barrier_wait(kGroupBarrier + group, kGroup);
      if (thread < kChunk) reinterpret_cast<float*>(stage + Stage::kBeta)[thread] = beta;
      norms(from);
      gates(from, rows_left(chunk));
      bool strong = false;
      if (kAnyGate) {
        strong = barrier_any(kGroupBarrier + group, kGroup, fminf(gx[15], gy[15]) < -kSafeLog2);
      } else {
        barrier_wait(kGroupBarrier + group, kGroup);
      }
      if (kAnyGate && strong) {
        operands_strong(from, stage);
      } else {
        operands(from, stage);
      }
      barrier_wait(kGroupBarrier + group, kGroup);
      if (kAnyGate && strong) {
        scores_strong(from, stage);
      } else {
        scores(from, stage);
      }
      barrier_wait(kGroupBarrier + group, kGroup);
      if (warp == 0) invert(stage);
      copy_async_wait<0>();
      barrier_arrive(kFullBarrier + slot, 2 * kGroup);
    }
  }
};

}  // namespace furlong::kda::cuda
