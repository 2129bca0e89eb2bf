#pragma once

// The part of a chunk that does not depend on the state, by one group of four warps: for this block's own walk
// (run_own) or for any walk of the machine (run_pooled, cuda/pool.cuh).
//
// G_i = sum of decay_log up to row i, in base 2. With the reference r = G_15 (end of the first 16 rows), the factors
// 2^{G_i - r} and 2^{r - G_j} of a gate bounded by -5 stay within 2^{+-115.5}, so the scores of all 32 rows are plain
// matrix products of bf16 operands:
//   A_ij = beta_i (k_i 2^{G_i - r}) . (k_j 2^{r - G_j}),  P_ij = (q_i 2^{G_i - r}) . (k_j 2^{r - G_j})
// A chunk in which a channel forgets more in 16 rows takes its scores pair by pair with exponents G_i - G_j <= 0.
// What meets the state has factors of at most one: q 2^G, k 2^G, k 2^{G_end - G}.

#include "furlong/ops/kda/cuda/layout.cuh"
#include "furlong/ops/kda/cuda/pool.cuh"
#include "furlong/ops/kda/cuda/warpgroup.cuh"

namespace furlong::kda::cuda {

inline constexpr float kSafeLog2 = 120.0f;     // 16 rows may forget 2^-120
inline constexpr float kLowestLog2 = -150.0f;  // 2^-150 is zero in fp32

/// Constants of the gate for one channel.
struct GateChannel {
  float slope, offset;
};

__device__ __forceinline__ GateChannel gate_channel(GateForm form, float a_log, float bias) {
  if (form == GateForm::kGiven) return {1.0f, 0.0f};
  const float slope = -expf(a_log) * kLog2E;
  return {slope, form == GateForm::kBounded ? slope * bias : bias};
}

/// sum + decay_log / ln 2 of one input.
template <bool kAnyGate>
__device__ __forceinline__ float add_gate(GateForm form, float lower_bound, GateChannel channel, float z, float sum) {
  if (!kAnyGate || form == GateForm::kBounded) {
    return fmaf(lower_bound * kLog2E, reciprocal_approx(1.0f + exp2_approx(fmaf(z, channel.slope, channel.offset))),
                sum);
  }
  if (form == GateForm::kGiven) return sum + fmaxf(z * kLog2E, kLowestLog2);
  const float x = z + channel.offset;
  return sum + fmaxf(channel.slope * (x > 20.0f ? x : log1pf(expf(x))), kLowestLog2);
}

__device__ __forceinline__ float load_element(const void* data, int64_t index, Element type) {
  return type == Element::kFloat ? static_cast<const float*>(data)[index]
                                 : __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
}

/// threadIdx.x in a form that the compiler computes anew: what derives from it is then not kept in registers over the
/// loop of a preparing group, where it would be spilled, and local memory is far away (shared memory leaves no L1).
__device__ __forceinline__ int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(thread));
  return thread;
}

template <typename Shape, bool kMap>
struct Preparer {
  static constexpr bool kAnyGate = Shape::kAnyGate;
  const Inputs& in;
  const Span* walk;  // of the chunk in hand
  int slice;         // of the columns of v; pooled chunks have no values
  char* shared;      // where the layout's offsets count from; pooled: the first preparing group's part
  int first_thread;  // of the first preparing group of this block
  int group, thread, warp, lane, block, column;  // this thread's 16 rows and first of two channels
  GateChannel gate0, gate1;
  float gx[16], gy[16];  // sums of gates within the 16 rows

  __device__ Preparer(const Inputs& inputs, char* memory, int first) : in(inputs), shared(memory), first_thread(first) {
    refresh();
  }

  /// At the start of every phase, see fresh_thread.
  __device__ void refresh() {
    const int index = fresh_thread() - (Shape::kPooled ? first_thread : kGroup);
    group = index / kGroup;
    thread = index % kGroup;
    warp = thread >> 5;
    lane = thread & 31;
    block = warp >> 1;
    column = (warp & 1) * 64 + lane * 2;
  }

  __device__ char* group_memory() const {
    if constexpr (Shape::kPooled) return shared + group * Shape::kGroupBytes;
    return nullptr;
  }
  __device__ char* input(int local) const {
    if constexpr (Shape::kPooled) {
      return group_memory();
    } else {
      return shared + Shape::kInputBase + (group * Shape::kBuffers + local % Shape::kBuffers) * Shape::kInputBytes;
    }
  }
  __device__ char* scratch() const {
    if constexpr (Shape::kPooled) {
      return group_memory() + Shape::kScratch;
    } else {
      return shared + Shape::kScratchBase + group * Scratch::kBytes;
    }
  }
  /// Where T, P and beta are made, at the offsets of Stage.
  __device__ char* squares() const {
    if constexpr (Shape::kPooled) {
      return group_memory() + Shape::kSquares - Stage::kInverse;
    } else {
      return shared + group * Shape::Ring::kBytes;
    }
  }
  __device__ int rows_left(int chunk) const { return min(kChunk, walk->tokens - chunk * kChunk); }

  __device__ const char* row_pointer(const Rows& rows, int chunk) const {
    const int64_t size = rows.type == Element::kFloat ? 4 : 2;
    return static_cast<const char*>(rows.data) +
           ((walk->first_token + static_cast<int64_t>(chunk) * kChunk) * rows.token_stride +
            walk->head * rows.head_stride) *
               size;
  }

  __device__ bool wide_gate() const { return kAnyGate && in.gate_NHK.type == Element::kFloat; }

  /// Starts the copy of q, k, gate of a chunk.
  __device__ void load_inputs(int chunk, int local) {
    refresh();
    if (chunk < walk->chunks) {
      const uint32_t to = shared_address(input(local));
      const int rows = rows_left(chunk);
      const auto copy = [&](const Rows& from, int where) {
        copy_rows<kRowBytes, kGroup>(to + where, tile_at, row_pointer(from, chunk), from.token_stride * 2, rows,
                                     thread);
      };
      if (!kMap) copy(in.q_NHK, Shape::kInputQuery);
      copy(in.k_NHK, Shape::kInputKey);
      if (wide_gate()) {
        copy_rows<kHead * 4, kGroup>(to + Shape::kInputGate, swizzled<kHead * 4>, row_pointer(in.gate_NHK, chunk),
                                     in.gate_NHK.token_stride * 4, rows, thread);
      } else {
        copy(in.gate_NHK, Shape::kInputGate);
      }
    }
    copy_async_commit();
  }

  /// The slice of a map's matrix part lies past the columns of v, which are not read then.
  __device__ void load_values(int chunk, char* stage, bool zero) {
    copy_rows<Shape::kColumns * 2, kGroup>(shared_address(stage + Shape::Ring::kValue), value_at<Shape::kColumns>,
                                           row_pointer(in.v_NHV, chunk) + slice * Shape::kColumns * 2,
                                           in.v_NHV.token_stride * 2, zero ? 0 : rows_left(chunk), thread);
    copy_async_commit();
  }

  __device__ float load_beta(int chunk) const {
    if (thread >= rows_left(chunk)) return 0.0f;
    const int64_t row = walk->first_token + static_cast<int64_t>(chunk) * kChunk + thread;
    const float beta = load_element(
        in.beta_NH.data, row * in.beta_NH.token_stride + walk->head * in.beta_NH.head_stride, in.beta_NH.type);
    return in.beta_is_logit ? reciprocal_approx(1.0f + exp2_approx(-kLog2E * beta)) : beta;
  }

  /// Factors of the rows of q (with `scale`) and k. Four threads a row.
  __device__ void norms(const char* from) const {
    const int row = thread >> 2;
    float factor = 1.0f;
#pragma unroll 1
    for (int tensor = kMap ? 1 : 0; tensor < 2; ++tensor) {  // q, k
      if (in.l2_norm) {
        const char* tile = from + (tensor == 0 ? Shape::kInputQuery : Shape::kInputKey);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int piece = (thread & 3) + 4 * ((i + row) & 3);  // neighbouring rows in different banks
          const uint4 words = *reinterpret_cast<const uint4*>(tile + tile_at(row, piece));
          for (const uint32_t pair : {words.x, words.y, words.z, words.w}) {
            const float2 x = unpack_bf16(pair);
            sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
          }
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        factor = rsqrtf(sum + in.l2_eps);
      }
      if ((thread & 3) == 0) {
        reinterpret_cast<float*>(scratch() + Scratch::kNorms)[row * 2 + tensor] =
            tensor == 0 ? factor * in.scale : factor;
      }
    }
  }

  /// Sums of gates within this thread's 16 rows; the last one goes to `Scratch::kTotals`.
  __device__ void gates(const char* from, int rows) {
    const bool wide = wide_gate();
    const char* tile = from + Shape::kInputGate;
    float sum_x = 0.0f, sum_y = 0.0f;
    // Two rounds of eight rows: unrolled fully, the loops of this file overflow the instruction cache.
#pragma unroll 1
    for (int first = block * 16; first < block * 16 + 16; first += 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float2 z;
        if (wide) {
          z = *reinterpret_cast<const float2*>(tile + first * kHead * 4 + swizzled<kHead * 4>(i, column >> 2) +
                                               (column & 3) * 4);
        } else {
          z = unpack_bf16(
              *reinterpret_cast<const uint32_t*>(tile + first * 128 + tile_at(i, column >> 3) + (column & 7) * 2));
        }
        sum_x = add_gate<kAnyGate>(in.gate_form, in.lower_bound, gate0, z.x, sum_x);
        sum_y = add_gate<kAnyGate>(in.gate_form, in.lower_bound, gate1, z.y, sum_y);
        gx[i] = gx[i + 8];
        gy[i] = gy[i + 8];
        gx[i + 8] = sum_x;
        gy[i + 8] = sum_y;
      }
      if (first + 8 > rows) {  // padding rows forget nothing
#pragma unroll
        for (int i = 8; i < 16; ++i) {
          if (first + i - 8 >= rows) {
            gx[i] = i > 8 || first % 16 != 0 ? gx[i - 1] : 0.0f;
            gy[i] = i > 8 || first % 16 != 0 ? gy[i - 1] : 0.0f;
          }
        }
        sum_x = gx[15];
        sum_y = gy[15];
      }
    }
    float* totals = reinterpret_cast<float*>(scratch() + Scratch::kTotals) + block * kHead + column;
    *reinterpret_cast<float2*>(totals) = make_float2(sum_x, sum_y);
  }

  /// Operands of the scores in place of the inputs, those of the recurrence and its decay to `stage`.
  __device__ void operands(char* from, char* stage) {
    const float* totals = reinterpret_cast<const float*>(scratch() + Scratch::kTotals) + column;
    const float2* factors = reinterpret_cast<const float2*>(scratch() + Scratch::kNorms);
    const float2 first = *reinterpret_cast<const float2*>(totals);
    const float2 second = *reinterpret_cast<const float2*>(totals + kHead);
    const float enter_x = exp2_approx(first.x), enter_y = exp2_approx(first.y);
    const float leave_x = exp2_approx(second.x), leave_y = exp2_approx(second.y);
    const float shift_x = block == 0 ? first.x : 0.0f, shift_y = block == 0 ? first.y : 0.0f;
    if (block == 0) {
      *reinterpret_cast<float2*>(stage + Stage::kDecay + column * 4) =
          make_float2(enter_x * leave_x, enter_y * leave_y);
    }
    // Several rows at a time: their loads before their first store, which might else wait for each other.
    constexpr int kBatch = 4;
#pragma unroll 1
    for (int first = block * 16; first < block * 16 + 16; first += 8) {
      char* inputs = from + first * 128;
      char* outputs = stage + first * 128;
#pragma unroll
      for (int batch = 0; batch < 8; batch += kBatch) {
        uint32_t k_words[kBatch], q_words[kBatch];
        float2 row_factors[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const uint32_t at = tile_at(batch + i, column >> 3) + (column & 7) * 2;
          k_words[i] = *reinterpret_cast<const uint32_t*>(inputs + Shape::kInputKey + at);
          if (!kMap) q_words[i] = *reinterpret_cast<const uint32_t*>(inputs + Shape::kInputQuery + at);
          row_factors[i] = factors[first + batch + i];
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const uint32_t at = tile_at(batch + i, column >> 3) + (column & 7) * 2;
          const auto put = [&](char* tile, float x, float y) {
            *reinterpret_cast<uint32_t*>(tile + at) = pack_bf16(x, y);
          };
          const float dx = gx[batch + i] - shift_x, dy = gy[batch + i] - shift_y;
          const float ax = exp2_approx(dx), ay = exp2_approx(dy), bx = exp2_approx(-dx), by = exp2_approx(-dy);
          const float2 k = unpack_bf16(k_words[i]);
          const float kx = k.x * row_factors[i].y, ky = k.y * row_factors[i].y;
          const float kax = kx * ax, kay = ky * ay, kbx = kx * bx, kby = ky * by;
          put(inputs + Shape::kInputKey, kax, kay);
          put(inputs + Shape::kInputGate, kbx, kby);
          put(outputs + Stage::kKey, -kax * enter_x, -kay * enter_y);
          put(outputs + Stage::kWrite, kbx * leave_x, kby * leave_y);
          if (!kMap) {
            const float2 q = unpack_bf16(q_words[i]);
            const float qax = q.x * row_factors[i].x * ax, qay = q.y * row_factors[i].x * ay;
            put(inputs + Shape::kInputQuery, qax, qay);
            put(outputs + Stage::kQuery, qax * enter_x, qay * enter_y);
          }
          gx[batch + i] = gx[batch + i + 8];
          gy[batch + i] = gy[batch + i + 8];
        }
      }
    }
  }

  /// The same for a chunk with a gate too strong for one reference: normalised q and k stay in place, G goes to the
  /// gate input's place in fp32.
  __device__ void operands_strong(char* from, char* stage) const {
    const float* totals = reinterpret_cast<const float*>(scratch() + Scratch::kTotals) + column;
    const float2* factors = reinterpret_cast<const float2*>(scratch() + Scratch::kNorms);
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
      const uint32_t at = tile_at(row, column >> 3) + (column & 7) * 2;
      const auto pair_at = [&](char* base) -> uint32_t& { return *reinterpret_cast<uint32_t*>(base + at); };
      const float sum_x = before_x + gx[i], sum_y = before_y + gy[i];
      *reinterpret_cast<float2*>(from + Shape::kInputGate + swizzled<kHead * 4>(row, column >> 2) + (column & 3) * 4) =
          make_float2(sum_x, sum_y);
      const float rest_x = block == 0 ? first.x - gx[i] + second.x : second.x - gx[i];
      const float rest_y = block == 0 ? first.y - gy[i] + second.y : second.y - gy[i];
      const float2 k_raw = unpack_bf16(pair_at(from + Shape::kInputKey));
      const float kx = k_raw.x * factors[row].y, ky = k_raw.y * factors[row].y;
      const float ex = exp2_approx(sum_x), ey = exp2_approx(sum_y);
      pair_at(from + Shape::kInputKey) = pack_bf16(kx, ky);
      pair_at(stage + Stage::kKey) = pack_bf16(-kx * ex, -ky * ey);
      pair_at(stage + Stage::kWrite) = pack_bf16(kx * exp2_approx(rest_x), ky * exp2_approx(rest_y));
      if (!kMap) {
        const float2 q_raw = unpack_bf16(pair_at(from + Shape::kInputQuery));
        const float qx = q_raw.x * factors[row].x, qy = q_raw.y * factors[row].x;
        pair_at(from + Shape::kInputQuery) = pack_bf16(qx, qy);
        pair_at(stage + Stage::kQuery) = pack_bf16(qx * ex, qy * ey);
      }
    }
  }

  __device__ void put_score(char* stage, int row, int col, float left, float right, bool is_query) const {
    if (is_query) {
      *reinterpret_cast<uint32_t*>(stage + Stage::kProbability + square_at(row, col)) =
          pack_bf16(col <= row ? left : 0.0f, col + 1 <= row ? right : 0.0f);
    } else {
      const float beta = reinterpret_cast<const float*>(stage + Stage::kBeta)[row];
      float* scores = reinterpret_cast<float*>(scratch() + Scratch::kScores);
      *reinterpret_cast<float2*>(scores + row * kScoreRow + col) =
          make_float2(col < row ? left * beta : 0.0f, col + 1 < row ? right * beta : 0.0f);
    }
  }

  /// Rows 16 m .. 16 m + 15, columns 16 n .. 16 n + 15 of A or P.
  __device__ void score_square(const char* from, char* stage, int m, int n, bool is_query) const {
    const int row_a = m * 16 + (lane & 15), row_b = n * 16 + (lane & 7) + ((lane >> 4) << 3);
    const uint32_t a_tile = shared_address(from + (is_query ? Shape::kInputQuery : Shape::kInputKey));
    const uint32_t b_tile = shared_address(from + Shape::kInputGate);
    float sums[2][4] = {};
#pragma unroll
    for (int step = 0; step < kHead / 16; ++step) {
      uint32_t a[4], b[4];
      load_blocks(a, a_tile + tile_at(row_a, 2 * step + (lane >> 4)));
      load_blocks(b, b_tile + tile_at(row_b, 2 * step + ((lane >> 3) & 1)));
      mma_bf16(sums[0], a, b[0], b[1]);
      mma_bf16(sums[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int row = m * 16 + (lane >> 2), col = n * 16 + tile * 8 + (lane & 3) * 2;
      put_score(stage, row, col, sums[tile][0], sums[tile][1], is_query);
      put_score(stage, row + 8, col, sums[tile][2], sums[tile][3], is_query);
    }
  }

  /// The upper right quarters stay as clear_squares left them. Squares in the order A: 00 10 11, P: 00 10 11.
  __device__ void scores(const char* from, char* stage) const {
#pragma unroll 1
    for (int square = warp; square < (kMap ? 3 : 6); square += 4) {
      const int place = square % 3;
      score_square(from, stage, place > 0 ? 1 : 0, place / 2, square >= 3);
    }
  }

  /// A and P pair by pair: lane = column, a warp takes every fourth row.
  __device__ void scores_strong(const char* from, char* stage) const {
    for (int row = warp; row < kChunk; row += 4) {
      float a = 0.0f, p = 0.0f;
      if (lane <= row) {
        for (int d = 0; d < kHead; d += 2) {
          const auto word = [&](int tile, int r) {
            return unpack_bf16(*reinterpret_cast<const uint32_t*>(from + tile + tile_at(r, d >> 3) + (d & 7) * 2));
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
      *reinterpret_cast<__nv_bfloat16*>(stage + Stage::kProbability + square_at(row, lane)) = __float2bfloat16(p);
    }
  }

  /// (I + A)^-1 diag(beta), one warp. The two 16 x 16 diagonal blocks by forward substitution in fp32 (half a warp
  /// each, lane = column), the block below by T21 = -(T22 A21) T11 in tf32.
  __device__ void invert(char* stage) const {
    const float* scores = reinterpret_cast<const float*>(scratch() + Scratch::kScores);
    const float* betas = reinterpret_cast<const float*>(stage + Stage::kBeta);
    float* corners = reinterpret_cast<float*>(scratch() + Scratch::kCorners);
    const int half = lane >> 4, own = lane & 15;
    const float* square = scores + half * 16 * (kScoreRow + 1);
    float* corner = corners + half * 16 * kCornerRow;
    const float beta = betas[lane];
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = own == i ? 1.0f : 0.0f;
      // Four rows at a time: solve them, then take them out of all rows below, which are independent of each other.
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
#pragma unroll
      for (int i = j + 1; i < 16; ++i) {
        const float4 a = *reinterpret_cast<const float4*>(square + i * kScoreRow + j);
        x[i] = fmaf(-a.x, x[j], x[i]);
        if (i > j + 1) x[i] = fmaf(-a.y, x[j + 1], x[i]);
        if (i > j + 2) x[i] = fmaf(-a.z, x[j + 2], x[i]);
        if (i > j + 3) x[i] = fmaf(-a.w, x[j + 3], x[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      corner[i * kCornerRow + own] = x[i];
      *reinterpret_cast<__nv_bfloat16*>(stage + Stage::kInverse + square_at(half * 16 + i, lane)) =
          __float2bfloat16(x[i] * beta);
    }
    __syncwarp();
    const int g = lane >> 2, c = lane & 3;
    const float *t11 = corners, *t22 = corners + 16 * kCornerRow, *a21 = scores + 16 * kScoreRow;
    float middle[2][4] = {}, result[2][4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const float* at = t22 + g * kCornerRow + step * 8 + c;
      const uint32_t a[4] = {to_tf32(at[0]), to_tf32(at[8 * kCornerRow]), to_tf32(at[4]),
                             to_tf32(at[8 * kCornerRow + 4])};
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float* b = a21 + (step * 8 + c) * kScoreRow + tile * 8 + g;
        mma_tf32(middle[tile], a, to_tf32(b[0]), to_tf32(b[4 * kScoreRow]));
      }
    }
    // Columns 2c and 2c + 1 of a C fragment serve as columns c and c + 4 of an A fragment: rows of T11 in that order.
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32_t a[4] = {to_tf32(-middle[step][0]), to_tf32(-middle[step][2]), to_tf32(-middle[step][1]),
                             to_tf32(-middle[step][3])};
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float* b = t11 + (step * 8 + 2 * c) * kCornerRow + tile * 8 + g;
        mma_tf32(result[tile], a, to_tf32(b[0]), to_tf32(b[kCornerRow]));
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float2 column_beta = *reinterpret_cast<const float2*>(betas + tile * 8 + 2 * c);
      const auto word = [&](int row) -> uint32_t& {
        return *reinterpret_cast<uint32_t*>(stage + Stage::kInverse + square_at(row, tile * 8 + 2 * c));
      };
      word(16 + g) = pack_bf16(result[tile][0] * column_beta.x, result[tile][1] * column_beta.y);
      word(24 + g) = pack_bf16(result[tile][2] * column_beta.x, result[tile][3] * column_beta.y);
    }
  }

  /// Zeros in T and P; later only what lies on or below the diagonal blocks is written.
  __device__ void clear_squares() const {
    static_assert(2 * kSquare == 2 * kGroup * 16 && Stage::kProbability == Stage::kInverse + kSquare);
    uint4* both = reinterpret_cast<uint4*>(squares() + Stage::kInverse);
    both[thread] = both[thread + kGroup] = make_uint4(0, 0, 0, 0);
  }

  __device__ void wait_group() const { barrier_wait(Shape::kGroupBarrier + group, kGroup); }

  /// Constants of this thread's two channels.
  __device__ void read_gate_channels() {
    if (in.gate_form == GateForm::kGiven) {
      gate0 = gate1 = {1.0f, 0.0f};
      return;
    }
    float a_log;
    float2 bias;
    if constexpr (Shape::kPooled) {
      a_log = *reinterpret_cast<const float*>(group_memory() + Shape::kDecayScale);
      bias = *reinterpret_cast<const float2*>(group_memory() + Shape::kBias + column * 4);
    } else {
      const float* biases = in.dt_bias_HK + static_cast<int64_t>(walk->head) * kHead + column;
      a_log = in.a_log_H[walk->head];
      bias = make_float2(biases[0], biases[1]);
    }
    gate0 = gate_channel(in.gate_form, a_log, bias.x);
    gate1 = gate_channel(in.gate_form, a_log, bias.y);
  }

  /// The inputs of a chunk have come: sums of gates and factors of rows.
  __device__ void sums(int chunk, int local) {
    wait_group();
    refresh();
    norms(input(local));
    refresh();
    if (Shape::kPooled) read_gate_channels();
    gates(input(local), rows_left(chunk));
    refresh();
  }

  /// Operands into `tiles`, which may be written now, then A, T, P.
  __device__ void products(int local, char* tiles, float beta) {
    if (thread < kChunk) reinterpret_cast<float*>(squares() + Stage::kBeta)[thread] = beta;
    bool strong = false;
    if (kAnyGate) {
      strong = barrier_any(Shape::kGroupBarrier + group, kGroup, fminf(gx[15], gy[15]) < -kSafeLog2);
    } else {
      wait_group();
    }
    refresh();
    if (kAnyGate && strong) {
      operands_strong(input(local), tiles);
    } else {
      operands(input(local), tiles);
    }
    refresh();
    wait_group();
    if (kAnyGate && strong) {
      scores_strong(input(local), squares());
    } else {
      scores(input(local), squares());
    }
    refresh();
  }

  /// All chunks of this group of the block's own walk. `zero_values`: v counts as zero.
  __device__ void run_own(const Walk& own, bool zero_values) {
    constexpr int kAhead = Shape::kBuffers - 1;  // loads of later chunks under way while one is prepared
    walk = &own;
    slice = own.slice;
    read_gate_channels();
    load_inputs(group, 0);
    clear_squares();
    for (int chunk = group, local = 0; chunk < walk->chunks; chunk += Shape::kGroups, ++local) {
      if (kAhead > 0) load_inputs(chunk + Shape::kGroups, local + 1);
      refresh();
      const float beta = load_beta(chunk);
      copy_async_wait<kAhead>();
      sums(chunk, local);
      if (chunk >= Shape::kStages) barrier_wait(Shape::kEmptyBarrier + group, 2 * kGroup);
      load_values(chunk, squares(), zero_values);
      products(local, squares(), beta);
      wait_group();
      if (kAhead == 0) load_inputs(chunk + Shape::kGroups, local + 1);
      refresh();
      if (warp == 0) invert(squares());
      copy_async_wait<1 - kAhead>();  // v has come
      group_publish();
      barrier_arrive(Shape::kFullBarrier + group, 2 * kGroup);
    }
  }

  __device__ Span* entry(int turn) const {
    return reinterpret_cast<Span*>(group_memory() + Shape::kEntries) + turn % 2;
  }
  __device__ PoolItem* item(int turn) const {
    return reinterpret_cast<PoolItem*>(group_memory() + Shape::kItems) + turn % 2;
  }
  /// By one thread: which chunk comes in turn `turn`, and the copy of its span.
  __device__ void place_item(const Pool& pool, int ticket, int turn) const {
    const PoolItem next = item_of(pool, ticket);
    *item(turn) = next;
    if (next.chunk >= pool.header->most_chunks) return;
    const char* span = reinterpret_cast<const char*>(pool.spans + next.task);
    copy_async_16(shared_address(entry(turn)), span);
    copy_async_16(shared_address(entry(turn)) + 16, span + 16);
  }
  /// Starts the copies of a chunk whose entry has come.
  __device__ void load_pooled(int chunk, int turn) {
    walk = entry(turn);
    if (in.gate_form != GateForm::kGiven) {
      const float* biases = in.dt_bias_HK + static_cast<int64_t>(walk->head) * kHead;
      copy_async_4(shared_address(group_memory() + Shape::kBias) + thread * 4, biases + thread);
      if (thread == 0) copy_async_4(shared_address(group_memory() + Shape::kDecayScale), in.a_log_H + walk->head);
    }
    load_inputs(chunk, 0);
  }

  /// T (one warp) or P (the others) to the pool; P is not used by maps.
  __device__ void store_squares(char* to) const {
    const int first = warp == 0 ? lane : kSquare / 16 + (warp - 1) * 32 + lane, step = warp == 0 ? 32 : 96;
    const int last = warp == 0 ? kSquare / 16 : kMap ? 0 : 2 * kSquare / 16;
    const uint4* from = reinterpret_cast<const uint4*>(squares() + Stage::kInverse);
    for (int i = first; i < last; i += step) reinterpret_cast<uint4*>(to + Stage::kInverse)[i] = from[i];
  }

  /// Chunks of all walks, as tickets have it.
  __device__ void run_pooled(const Pool& pool) {
    const int most_chunks = pool.header->most_chunks;
    if (thread == 0) place_item(pool, draw_ticket(pool), 0);
    copy_async_commit();
    copy_async_wait<0>();
    clear_squares();
    wait_group();
    int chunk = item(0)->chunk, turn = 0;
    if (chunk < most_chunks) load_pooled(chunk, 0);
    for (; chunk < most_chunks; ++turn) {
      refresh();
      walk = entry(turn);
      // What thread 0 and those that watch a walker ask for now is used after the sums.
      const int ticket = thread == 0 ? draw_ticket(pool) : 0;
      const int* fetched = pool.fetched + (walk->first_walker + thread) * kFlagStep;
      const bool watches = thread < walk->walkers;
      int seen = watches ? load_relaxed(fetched) : 0;
      const float beta = load_beta(chunk);
      copy_async_wait<0>();
      sums(chunk, 0);
      if (thread == 0) place_item(pool, ticket, turn + 1);
      copy_async_commit();
      while (watches && seen < chunk + 1 - pool.slots) {
        __nanosleep(500);
        seen = load_relaxed(fetched);
      }
      __syncwarp();
      const int task = item(turn)->task, slot = chunk % pool.slots;
      char* tiles = pool.ring + (static_cast<int64_t>(task) * pool.slots + slot) * Stage::kPrepared;
      products(0, tiles, beta);
      copy_async_wait<0>();
      wait_group();
      const int next = item(turn + 1)->chunk;
      if (next < most_chunks) load_pooled(next, turn + 1);
      refresh();
      if (warp == 0) {
        invert(squares());
        __syncwarp();
      }
      store_squares(tiles);
      wait_group();
      if (thread == kGroup - 1) store_release(pool.ready + task * pool.ready_step + slot, chunk + 1);
      chunk = next;
    }
  }
};

}  // namespace furlong::kda::cuda
