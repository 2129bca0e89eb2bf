#pragma once

// What the gradient kernels share: the chunk table, the workspace, and the decays of one chunk.
//   X slots of chunks   H heads   D = K = V   rows of a chunk in 4 blocks of 16, each of two halves of 8
//
// G_i = sum of log2 decays up to and including row i of a block, counted from the chunk's start. For rows i of block I
// and j of block J < I:  2^(G_i - G_j) = row_i * 2^(rho_I - kappa_J) * column_j,  row_i = 2^(G_i - rho_I),
// column_j = 2^(kappa_J - G_j). rho_I = kappa_I = G at the block's middle, so that the same factors serve i and j of
// one block, as long as half a block forgets less than 42 nats (a gate bounded by -5 forgets 40). A wider block takes
// rho at its start and kappa at its end: every factor is at most 1, and the block's own square is summed pair by pair.

#include "furlong/ops/kda/cuda/backward_args.h"
#include "furlong/ops/kda/cuda/tile.cuh"

namespace furlong::kda::cuda {

inline constexpr float kWidestHalf = 42.0f * kLog2E;
// A decay of 2^-144 is zero in fp32. Cutting stronger ones there keeps sums of log decays small and hence exact.
inline constexpr float kStrongest = -144.0f;

/// Slot of chunk `chunk` of the sequence `b` that starts at token `start`: distinct without a table.
FURLONG_DEVICE int64_t slot_of(int64_t start, int64_t b, int64_t chunk) {
  return start / kGradientChunk + b + chunk;
}

struct ChunkEntry {
  int64_t first;  // packed row of its first token
  int rows;       // 0: the slot is empty
  int sequence;
};

/// Everything is indexed by tile = slot * H + head. bf16 tiles are [64, D] or, states, [D, D].
struct GradientWork {
  int slots;
  ChunkEntry* table_X;
  // early
  bf16* minus_w;  // -T beta k exp(G), T = (I + A)^-1
  bf16* k_end;    // k exp(G at the end - G)
  bf16* q_start;  // scale q exp(G)
  // kept
  bf16* values;    // T beta v, then w
  bf16* d_values;  // P^T d_out, then d_w
  bf16* inverse;   // T [64, 64]
  bf16* states;    // entering the chunk
  bf16* d_states;  // gradient of the state leaving the chunk
  float* end;      // exp(G at the end) [D]
  float* partial;  // sums over the chunk of dz and of dz (z + dt_bias) [2, D]
};

/// Shared memory of decayed_rows.
template <int kD>
struct DecayScratch {
  static constexpr int kParts = kD / 64;  // warps that share a row
  float half_total[8][kD];
  float rho[5][kD];  // rho[4]: G at the chunk's end
  float kappa[4][kD];
  float squares[kParts][2][64];
  float norm[2][64];  // 1 / norm of the rows of q and k
  float beta[64];
  int half_wide[8][kParts];

  FURLONG_DEVICE bool wide(int block) const {
    int any = 0;
    for (int part = 0; part < kParts; ++part) any |= half_wide[2 * block][part] | half_wide[2 * block + 1][part];
    return any != 0;
  }
};

/// First element of a head's row; rows follow at `stride`.
FURLONG_DEVICE const bf16* bf16_rows(const Rows& x, int64_t n, int h) {
  return static_cast<const bf16*>(x.data) + n * x.token_stride + h * x.head_stride;
}
FURLONG_DEVICE uint32_t word_at(const bf16* x) {
  return *reinterpret_cast<const uint32_t*>(x);
}

FURLONG_DEVICE float load_one(const Rows& x, int64_t n, int h) {
  const int64_t at = n * x.token_stride + h * x.head_stride;
  return x.type == Element::kBFloat16 ? __bfloat162float(static_cast<const bf16*>(x.data)[at])
                                      : static_cast<const float*>(x.data)[at];
}

FURLONG_DEVICE float sigmoid_fast(float x) {
  return reciprocal(1.0f + exp2_fast(-x * kLog2E));
}

FURLONG_DEVICE float beta_of(const Inputs& in, int64_t n, int h) {
  const float x = load_one(in.beta_NH, n, h);
  return in.beta_is_logit ? sigmoid_fast(x) : x;
}

/// The gate of one head and two channels; without kAny always the bounded one.
template <bool kAny>
struct Gate {
  GateForm form;
  float a, lower_bound;
  float2 bias;

  FURLONG_DEVICE Gate(const Inputs& in, int h, int d)
      : form(kAny ? in.gate_form : GateForm::kBounded), a(1), lower_bound(in.lower_bound), bias{0, 0} {
    if (form == GateForm::kGiven) return;
    a = exp2_fast(in.a_log_H[h] * kLog2E);
    bias = *reinterpret_cast<const float2*>(in.dt_bias_HK + h * in.key_size + d);
  }
  /// Log2 of the decay.
  FURLONG_DEVICE float log2_decay(float z, float offset) const {
    if (form == GateForm::kBounded) {
      const float g = lower_bound * kLog2E * sigmoid_fast(a * (z + offset));
      return kAny ? fmaxf(g, kStrongest) : g;
    }
    if (form == GateForm::kGiven) return fmaxf(z * kLog2E, kStrongest);
    return fmaxf(-a * kLog2E * softplus(z + offset), kStrongest);
  }
  static FURLONG_DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(exp2_fast(x * kLog2E)); }
  /// d z from the gradient of the natural log decay.
  FURLONG_DEVICE float d_z(float z, float offset, float d_g) const {
    if (form == GateForm::kBounded) {
      // y (1 - y) without the cancellation of 1 - y.
      const float tail = exp2_fast(-fabsf(a * (z + offset)) * kLog2E), whole = reciprocal(1.0f + tail);
      return d_g * lower_bound * tail * whole * whole * a;
    }
    if (form == GateForm::kSoftplus) return -a * sigmoid_fast(z + offset) * d_g;
    return d_g;
  }
  /// What one element gives to d a_log: bounded dz (z + bias); softplus dg g.
  FURLONG_DEVICE float d_a_log(float z, float offset, float d_g, float d_z) const {
    if (form == GateForm::kBounded) return d_z * (z + offset);
    if (form == GateForm::kSoftplus) return d_g * -a * softplus(z + offset);
    return 0.0f;
  }
};

/// Eight rows from `first` on of one tensor, two channels; rows past the last one repeat it.
FURLONG_DEVICE void load_words(uint32_t (&x)[8], const bf16* head, int64_t stride, int first, int rows) {
  const int step = static_cast<int>(stride);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = word_at(head + (first + i < rows ? first + i : rows - 1) * step);
}

/// The gate's input, eight rows of two channels.
FURLONG_DEVICE void load_gate(float2 (&z)[8], const Rows& gate, const ChunkEntry& chunk, int h, int first, int d) {
  if (gate.type == Element::kBFloat16) {
    uint32_t words[8];
    load_words(words, bf16_rows(gate, chunk.first, h) + d, gate.token_stride, first, chunk.rows);
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i] = unpack(words[i]);
  } else {
    const float* head = static_cast<const float*>(gate.data) + chunk.first * gate.token_stride + h * gate.head_stride;
    const int step = static_cast<int>(gate.token_stride);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = first + i < chunk.rows ? first + i : chunk.rows - 1;
      z[i] = *reinterpret_cast<const float2*>(head + row * step + d);
    }
  }
}

/// Sums v[0 .. 2 kKeep - 1] over lanes that differ in the bits of kMask and below it; the sums spread over the lanes.
template <int kMask, int kKeep>
FURLONG_DEVICE void fold(float (&v)[16], int lane) {
  const bool high = (lane & kMask) != 0;
#pragma unroll
  for (int i = 0; i < kKeep; ++i) {
    const float sent = high ? v[i] : v[i + kKeep], own = high ? v[i + kKeep] : v[i];
    v[i] = own + shuffle_xor(sent, kMask);
  }
}
/// Sums v[0..15] over the warp; lane l returns the sum of v[l / 2].
FURLONG_DEVICE float sum_sixteen(float (&v)[16], int lane) {
  fold<16, 8>(v, lane);
  fold<8, 4>(v, lane);
  fold<4, 2>(v, lane);
  fold<2, 1>(v, lane);
  return v[0] + shuffle_xor(v[0], 1);
}

/// Four words of each of the four lanes of a quad, turned: lane q ends with word q of lanes 0 to 3.
FURLONG_DEVICE void transpose_quad(uint32_t (&w)[4], int lane) {
  const auto exchange = [&](uint32_t& low, uint32_t& high, int mask) {
    const bool upper = (lane & mask) != 0;
    const uint32_t received = shuffle_xor_word(upper ? low : high, mask);
    low = upper ? received : low;
    high = upper ? high : received;
  };
  exchange(w[0], w[1], 1);
  exchange(w[2], w[3], 1);
  exchange(w[0], w[2], 2);
  exchange(w[1], w[3], 2);
}

/// A lane's 16 bytes of two adjacent 16 x 8 accumulators after transpose_quad of the words (row 0 left, row 0 right,
/// row 8 left, row 8 right): full sectors of memory instead of halves.
struct QuadPlace {
  int row, tile;  // 0 or 1: the row or eight below; the left or right accumulator
  FURLONG_DEVICE explicit QuadPlace(int lane) : row((lane & 3) >> 1), tile(lane & 1) {}
};

/// One row and two channels of a chunk under their decays.
struct DecayedPair {
  float2 q, k;         // normalised
  float2 log;          // G - rho
  float2 row, column;  //
};

/// Each thread takes eight rows of two channels: calls emit(row, channel, DecayedPair) for each row. 4 D threads.
/// Leaves rho, kappa, norms and betas in s. Two barriers; the caller needs one more before others read what emit wrote.
template <int kD, bool kWide, typename Emit>
FURLONG_DEVICE void decayed_rows(const Inputs& in, const ChunkEntry& chunk, int h, DecayScratch<kD>& s,
                                 const Emit& emit) {
  const int tid = thread_index(), lane = tid & 31;
  const int half = tid / (kD / 2), d = tid % (kD / 2) * 2, part = tid % (kD / 2) / 32;
  uint32_t q[8], k[8];
  float2 g[8];
  load_gate(g, in.gate_NHK, chunk, h, half * 8, d);
  load_words(q, bf16_rows(in.q_NHK, chunk.first, h) + d, in.q_NHK.token_stride, half * 8, chunk.rows);
  load_words(k, bf16_rows(in.k_NHK, chunk.first, h) + d, in.k_NHK.token_stride, half * 8, chunk.rows);
  const Gate<kWide> gate(in, h, d);
  if (tid < 64) s.beta[tid] = tid < chunk.rows ? beta_of(in, chunk.first + tid, h) : 0.0f;
  float2 total{0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool inside = half * 8 + i < chunk.rows;
    g[i] = {inside ? gate.log2_decay(g[i].x, gate.bias.x) : 0.0f, inside ? gate.log2_decay(g[i].y, gate.bias.y) : 0.0f};
    q[i] = inside ? q[i] : 0u;
    k[i] = inside ? k[i] : 0u;
    total = {total.x + g[i].x, total.y + g[i].y};
  }
  *reinterpret_cast<float2*>(&s.half_total[half][d]) = total;
  if (kWide) {
    const float cut = half % 2 == 0 ? 1.0f : 0.0f;
    const bool wide = fminf(total.x - cut * g[0].x, total.y - cut * g[0].y) < -kWidestHalf;
    const bool any = warp_any(wide);
    if (lane == 0) s.half_wide[half][part] = any ? 1 : 0;
  }
  if (in.l2_norm) {
    float squares[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 x = unpack(q[i]), y = unpack(k[i]);
      squares[i] = x.x * x.x + x.y * x.y;
      squares[8 + i] = y.x * y.x + y.y * y.y;
    }
    const float sum = sum_sixteen(squares, lane);
    const int which = lane / 2;
    if (lane % 2 == 0) s.squares[part][which / 8][half * 8 + which % 8] = sum;
  }
  sync_block();

  const int block = half / 2;
  const bool upper = half % 2 != 0, is_wide = kWide && s.wide(block);
  float2 base{0, 0}, all{0, 0}, lower{0, 0}, both{0, 0};
#pragma unroll
  for (int other = 0; other < 8; ++other) {
    const float2 x = *reinterpret_cast<const float2*>(&s.half_total[other][d]);
    if (other < 2 * block) base = {base.x + x.x, base.y + x.y};
    if (other == 2 * block) lower = x;
    if (other / 2 == block) both = {both.x + x.x, both.y + x.y};
    all = {all.x + x.x, all.y + x.y};
  }
  // G is counted from rho: origin is the value before this half's first row.
  float2 log, turn{0, 0};
  if (is_wide) {
    log = upper ? lower : float2{0, 0};
    turn = both;
  } else {
    log = upper ? float2{0, 0} : float2{-lower.x, -lower.y};
  }
  if (!upper) {
    const float2 rho = is_wide ? base : float2{base.x + lower.x, base.y + lower.y};
    *reinterpret_cast<float2*>(&s.rho[block][d]) = rho;
    *reinterpret_cast<float2*>(&s.kappa[block][d]) = {rho.x + turn.x, rho.y + turn.y};
    if (block == 0) *reinterpret_cast<float2*>(&s.rho[4][d]) = all;
  }
  if (tid < 128) {
    float sum = in.l2_eps;
    for (int other = 0; other < DecayScratch<kD>::kParts; ++other) sum += s.squares[other][tid / 64][tid % 64];
    s.norm[tid / 64][tid % 64] = in.l2_norm ? rsqrt_fast(sum) : 1.0f;
  }
  sync_block();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = half * 8 + i;
    log = {log.x + g[i].x, log.y + g[i].y};
    DecayedPair pair;
    const float norm_q = s.norm[0][row], norm_k = s.norm[1][row];
    pair.q = unpack(q[i]);
    pair.k = unpack(k[i]);
    pair.q = {pair.q.x * norm_q, pair.q.y * norm_q};
    pair.k = {pair.k.x * norm_k, pair.k.y * norm_k};
    pair.log = log;
    pair.row = {exp2_fast(log.x), exp2_fast(log.y)};
    pair.column = is_wide ? float2{exp2_fast(turn.x - log.x), exp2_fast(turn.y - log.y)}
                          : float2{reciprocal(pair.row.x), reciprocal(pair.row.y)};
    emit(row, d, pair);
  }
}

/// Asks for the rows of a chunk of one tensor to be brought to the L2.
template <int kD>
FURLONG_DEVICE void prefetch_rows(const Rows& x, const ChunkEntry& chunk, int h, int thread) {
  const int bytes = x.type == Element::kBFloat16 ? 2 : 4, lines = kD * bytes / 128;
  if (thread >= 0 && thread < chunk.rows * lines) {
    const int64_t at = (chunk.first + thread / lines) * x.token_stride + h * x.head_stride;
    prefetch(static_cast<const unsigned char*>(x.data) + at * bytes + thread % lines * 128);
  }
}

/// Copies a [kRows, kCols] tile by kThreads threads; kStride elements between rows, or, if that is 0, `stride`. Rows
/// from `rows` on become zero.
template <int kRows, int kCols, int kThreads, int kStride = 0>
FURLONG_DEVICE void load_tile(const Tile<kCols>& tile, const bf16* from, int64_t stride = 0, int rows = kRows) {
  constexpr int kPieces = kCols / 8, kStep = kThreads / kPieces;
  static_assert(kStep % 8 == 0);  // the permutation inside rows repeats
  const int first = thread_index() / kPieces, col = thread_index() % kPieces * 8;
  bf16* to = tile.at(first, col);
  const int step = kStride > 0 ? kStride : static_cast<int>(stride);
  from += first * step + col;
#pragma unroll
  for (int row = 0; row < kRows; row += kStep) {
    if (kRows % kStep != 0 && first + row >= kRows) break;
    const bool inside = kStride > 0 || first + row < rows;
    copy_async(to + row * kCols, inside ? from + row * step : from - first * step, inside);
  }
}

FURLONG_DEVICE float2 float_pair(const float* row, int col) {
  return *reinterpret_cast<const float2*>(row + col);
}

/// 2^(a - b) of two channels.
FURLONG_DEVICE float2 decay_between(float2 a, float2 b) {
  return {exp2_fast(a.x - b.x), exp2_fast(a.y - b.y)};
}

}  // namespace furlong::kda::cuda
