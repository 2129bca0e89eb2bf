#pragma once

// Last kernel of the gradient, all chunks and heads at once; a resident block goes from chunk to chunk and fetches the
// next one's tiles while it works. With S, d_S the states around the chunk, w and d_w from the walks, KN = -beta row k:
//
//   r   = T^T d_w             d_v = beta r        d_beta = sum r v - sum row k d_KN
//   dP  = Tril(d_out w^T)     dA = StrictTril(r w^T)       (the gradient of -A)
//   d_Q  = d_out S^T 2^rho + sum_J dP_IJ 2^(rho_I - kappa_J) column k
//   d_KN = r S^T 2^rho     + sum_J dA_IJ 2^(rho_I - kappa_J) column k
//   d_C  = w d_S^T 2^(end - kappa) + sum_I 2^(rho_I - kappa_J) (dP_IJ^T scale q row + dA_IJ^T KN)
//   d_q = scale row d_Q       d_k = -beta row d_KN + column d_C
//   d_G = (scale q row) d_Q + KN d_KN - (column k) d_C,  and for every row the constant
//         sum_v S d_S exp(G_end) + sum_j (column k) 2^(end - kappa) (w d_S^T)_j
//   d_decay_log_i = constant + sum of d_G over rows i and later
//
// The sums over blocks run as Horner's scheme in the decays between blocks. The operands of d_G are the rounded ones of
// the products, so that what enters for one row and leaves for another cancels to fp32.

#include "furlong/ops/kda/cuda_backward_chunk.cuh"

namespace furlong::kda::cuda {

template <int kD>
struct FinishShared {
  static constexpr int kTile = 64 * kD * 2, kSquareTile = 64 * 64 * 2, kStateTile = kD * kD * 2;
  static constexpr int kW = 0, kOut = kTile, kR = 2 * kTile;
  static constexpr int kState = 3 * kTile, kDState = kState + kStateTile;
  static constexpr int kReads = kDState + kStateTile;   // T, then dP
  static constexpr int kWrites = kReads + kSquareTile;  // dA, then sums over rows and columns
  static constexpr int kQ = kWrites + kSquareTile, kNegK = kQ + kTile, kColumn = kNegK + kTile;
  static constexpr int kLog = kColumn + kTile;  // row factors (their logs with kPairs), then d_G
  static constexpr int kDecays = kLog + 64 * kD * 4;
  static constexpr int kConstant = kDecays + static_cast<int>(sizeof(DecayScratch<kD>));
  static constexpr int kRowBeta = kConstant + 5 * kD * 4;
  static constexpr int kBytes = kRowBeta + kD / 32 * 64 * 4;
};

/// Views of the shared memory.
template <int kD>
struct FinishTiles {
  using At = FinishShared<kD>;
  unsigned char* memory;
  FURLONG_DEVICE Tile<kD> tile(int offset) const { return {reinterpret_cast<bf16*>(memory + offset)}; }
  FURLONG_DEVICE Tile<64> square(int offset) const { return {reinterpret_cast<bf16*>(memory + offset)}; }
  FURLONG_DEVICE float* floats(int offset) const { return reinterpret_cast<float*>(memory + offset); }
  FURLONG_DEVICE FloatTile<kD> logs() const { return {floats(At::kLog)}; }
  FURLONG_DEVICE DecayScratch<kD>& decays() const { return *reinterpret_cast<DecayScratch<kD>*>(memory + At::kDecays); }
};

/// Where a warp works: rows [16 block, 16 block + 16), columns [col, col + 32).
struct Place {
  int lane, block, share, col;
  FURLONG_DEVICE Place() : lane(thread_index() & 31) {
    const int warp = thread_index() >> 5;
    block = warp % 4;
    share = warp / 4;
    col = share * 32;
  }
  FURLONG_DEVICE int row(int r) const { return block * 16 + (lane >> 2) + r * 8; }
  FURLONG_DEVICE int channel(int n) const { return col + n * 8 + (lane & 3) * 2; }
};

/// acc += left right for one 16-row step of the contraction, 32 columns.
template <int kD>
FURLONG_DEVICE void add_step(float (&acc)[4][4], const uint32_t (&a)[4], const Tile<kD>& right, int k,
                             const Place& at) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    uint32_t b[4];
    right.right(b, k, at.col + n * 16, at.lane);
    multiply(acc[2 * n], a, b[0], b[1]);
    multiply(acc[2 * n + 1], a, b[2], b[3]);
  }
}

/// Writes this thread's words of a contiguous [N, H, D] tensor.
template <int kD>
FURLONG_DEVICE void store_words(void* to, const uint32_t (&x)[2][4], const ChunkEntry& chunk, int heads, int h,
                                const Place& at) {
  const QuadPlace own(at.lane);
  const int row = at.row(own.row);
  bf16* head = static_cast<bf16*>(to) + ((chunk.first + row) * heads + h) * kD + at.col + own.tile * 8;
#pragma unroll
  for (int n = 0; n < 4; n += 2) {
    uint32_t w[4] = {x[0][n], x[0][n + 1], x[1][n], x[1][n + 1]};
    transpose_quad(w, at.lane);
    if (row < chunk.rows) *reinterpret_cast<uint4*>(head + n * 8) = uint4{w[0], w[1], w[2], w[3]};
  }
}

FURLONG_DEVICE float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

/// acc *= 2^(a - b) column by column; b may be null for zero.
FURLONG_DEVICE void decay_columns(float (&acc)[4][4], const float* a, const float* b, const Place& at) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int d = at.channel(n);
    const float2 f = decay_between(float_pair(a, d), b == nullptr ? float2{0, 0} : float_pair(b, d));
    acc[n][0] *= f.x;
    acc[n][1] *= f.y;
    acc[n][2] *= f.x;
    acc[n][3] *= f.y;
  }
}

FURLONG_DEVICE void decay_columns(float (&acc)[4][4], float (&other)[4][4], const float* a, const float* b,
                                  const Place& at) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int d = at.channel(n);
    const float2 f = decay_between(float_pair(a, d), b == nullptr ? float2{0, 0} : float_pair(b, d));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      acc[n][e] *= (e & 1) != 0 ? f.y : f.x;
      other[n][e] *= (e & 1) != 0 ? f.y : f.x;
    }
  }
}

/// Fetches all tiles of a chunk but T.
template <int kD>
FURLONG_DEVICE void fetch_chunk(const BackwardArgs& args, const GradientWork& work, const ChunkEntry& chunk,
                                int64_t tile, int h, const FinishTiles<kD>& mem) {
  using At = FinishShared<kD>;
  const Rows& o = args.d_out_NHV;
  constexpr int kThreads = 4 * kD;
  load_tile<64, kD, kThreads, kD>(mem.tile(At::kW), work.values + tile * 64 * kD);
  load_tile<64, kD, kThreads, kD>(mem.tile(At::kR), work.d_values + tile * 64 * kD);
  load_tile<64, kD, kThreads>(mem.tile(At::kOut), bf16_rows(o, chunk.first, h), o.token_stride, chunk.rows);
  load_tile<kD, kD, kThreads, kD>(mem.tile(At::kState), work.states + tile * kD * kD);
  load_tile<kD, kD, kThreads, kD>(mem.tile(At::kDState), work.d_states + tile * kD * kD);
  const int tid = thread_index();
  prefetch_rows<kD>(args.in.q_NHK, chunk, h, tid);
  prefetch_rows<kD>(args.in.k_NHK, chunk, h, tid - kD);
  prefetch_rows<kD>(args.in.gate_NHK, chunk, h, tid - 2 * kD);
  prefetch_rows<kD>(args.in.v_NHV, chunk, h, tid);
}

/// This thread's words of a tensor's chunk, rows past the last one repeating it.
template <int kD>
FURLONG_DEVICE void own_words(uint32_t (&x)[2][4], const Rows& from, const ChunkEntry& chunk, int h, const Place& at) {
  const QuadPlace own(at.lane);
  const int row = at.row(own.row) < chunk.rows ? at.row(own.row) : chunk.rows - 1;
  const bf16* head =
      bf16_rows(from, chunk.first, h) + row * static_cast<int>(from.token_stride) + at.col + own.tile * 8;
#pragma unroll
  for (int n = 0; n < 4; n += 2) {
    const uint4 words = *reinterpret_cast<const uint4*>(head + n * 8);
    uint32_t w[4] = {words.x, words.y, words.z, words.w};
    transpose_quad(w, at.lane);
    x[0][n] = w[0];
    x[0][n + 1] = w[1];
    x[1][n] = w[2];
    x[1][n + 1] = w[3];
  }
}

/// r in place of d_w; d_v; the part of d_beta through the values. One barrier inside, none after.
template <int kD>
FURLONG_DEVICE void solve_values(const BackwardArgs& args, const ChunkEntry& chunk, int h, const FinishTiles<kD>& mem,
                                 const Place& at) {
  using At = FinishShared<kD>;
  const DecayScratch<kD>& s = mem.decays();
  const Tile<kD> d_w = mem.tile(At::kR);
  uint32_t values[2][4];
  own_words<kD>(values, args.in.v_NHV, chunk, h, at);
  float r[4][4] = {};
  for (int k = at.block; k < 4; ++k) {
    uint32_t a[4];
    mem.square(At::kReads).left_transposed(a, k * 16, at.block * 16, at.lane);
    add_step(r, a, d_w, k * 16, at);
  }
  sync_block();
  uint32_t d_v[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = at.row(half);
    const float beta = s.beta[row];
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float x = r[n][2 * half], y = r[n][2 * half + 1];
      d_w.word(row, at.channel(n)) = pack(x, y);
      const float2 v = unpack(values[half][n]);
      sum += x * v.x + y * v.y;
      d_v[half][n] = pack(beta * x, beta * y);
    }
    sum = quad_sum(sum);
    if ((at.lane & 3) == 0) mem.floats(At::kRowBeta)[at.share * 64 + row] = sum;
  }
  store_words<kD>(args.d_v_NHV, d_v, chunk, static_cast<int>(args.in.heads), h, at);
}

/// dP and dA.
template <int kD>
FURLONG_DEVICE void score_gradients(const FinishTiles<kD>& mem) {
  using At = FinishShared<kD>;
  constexpr int kShare = kD / 64;
  const int lane = thread_index() & 31, warp = thread_index() >> 5, row_block = warp / 2 % 4;
  const bool read = warp % 2 == 0;
  const Tile<kD> left = mem.tile(read ? At::kOut : At::kR), w = mem.tile(At::kW);
  const Tile<64> out = mem.square(read ? At::kReads : At::kWrites);
  for (int column_block = warp / 8; column_block <= row_block; column_block += kShare) {
    float acc[2][4] = {};
#pragma unroll
    for (int k = 0; k < kD; k += 16) {
      uint32_t a[4], b[4];
      left.left(a, row_block * 16, k, lane);
      w.right_transposed(b, column_block * 16, k, lane);
      multiply(acc[0], a, b[0], b[1]);
      multiply(acc[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = row_block * 16 + (lane >> 2) + r * 8, j = column_block * 16 + n * 8 + (lane & 3) * 2;
        const int seen = read ? i : i - 1;
        out.word(i, j) = pack(j <= seen ? acc[n][2 * r] : 0.0f, j + 1 <= seen ? acc[n][2 * r + 1] : 0.0f);
      }
    }
  }
}

/// Products with the states, and the constant of each channel in parts: row 0 the states' own, row 1 + I that of row
/// block I.
template <int kD>
FURLONG_DEVICE void state_products(const FinishTiles<kD>& mem, const Place& at, float (&d_q)[4][4],
                                   float (&d_neg_k)[4][4], float (&d_column)[4][4]) {
  using At = FinishShared<kD>;
  const DecayScratch<kD>& s = mem.decays();
#pragma unroll
  for (int k = 0; k < kD; k += 16) {
    uint32_t a_out[4], a_r[4], a_w[4], b[4];
    mem.tile(At::kOut).left(a_out, at.block * 16, k, at.lane);
    mem.tile(At::kR).left(a_r, at.block * 16, k, at.lane);
    mem.tile(At::kW).left(a_w, at.block * 16, k, at.lane);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mem.tile(At::kState).right_transposed(b, at.col + n * 16, k, at.lane);
      multiply(d_q[2 * n], a_out, b[0], b[1]);
      multiply(d_q[2 * n + 1], a_out, b[2], b[3]);
      multiply(d_neg_k[2 * n], a_r, b[0], b[1]);
      multiply(d_neg_k[2 * n + 1], a_r, b[2], b[3]);
      mem.tile(At::kDState).right_transposed(b, at.col + n * 16, k, at.lane);
      multiply(d_column[2 * n], a_w, b[0], b[1]);
      multiply(d_column[2 * n + 1], a_w, b[2], b[3]);
    }
  }
  float* constant = mem.floats(At::kConstant);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int d = at.channel(n);
    float2 sum{0, 0};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 k = unpack(mem.tile(At::kColumn).word(at.row(r), d));
      sum = {sum.x + k.x * d_column[n][2 * r], sum.y + k.y * d_column[n][2 * r + 1]};
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) sum = {sum.x + shuffle_xor(sum.x, mask), sum.y + shuffle_xor(sum.y, mask)};
    const float2 f = decay_between(float_pair(s.rho[4], d), float_pair(s.kappa[at.block], d));
    if (at.lane < 4) *reinterpret_cast<float2*>(constant + (1 + at.block) * kD + d) = {sum.x * f.x, sum.y * f.y};
  }
  constexpr int kSpan = kD / 4;
  const int d = thread_index() / 4, v = thread_index() % 4 * kSpan;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kSpan; i += 8) {
    const uint4 x = *reinterpret_cast<const uint4*>(mem.tile(At::kState).at(d, v + i));
    const uint4 y = *reinterpret_cast<const uint4*>(mem.tile(At::kDState).at(d, v + i));
    const uint32_t left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 p = unpack(left[e]), q = unpack(right[e]);
      sum += p.x * q.x + p.y * q.y;
    }
  }
  sum = quad_sum(sum);
  if (thread_index() % 4 == 0) constant[d] = sum * exp2_fast(s.rho[4][d]);
}

/// Adds what the scores give to their operands, block by block.
template <int kD, bool kPairs>
FURLONG_DEVICE void score_products(const FinishTiles<kD>& mem, const Place& at, float (&d_q)[4][4],
                                   float (&d_neg_k)[4][4], float (&d_column)[4][4]) {
  using At = FinishShared<kD>;
  const DecayScratch<kD>& s = mem.decays();
  const Tile<64> reads = mem.square(At::kReads), writes = mem.square(At::kWrites);
  const Tile<kD> q = mem.tile(At::kQ), neg_k = mem.tile(At::kNegK), column = mem.tile(At::kColumn);
  const int own = at.block;
  uint32_t a[4];
  const auto look_back = [&](int other) {
    uint32_t c[4], b[4];
    reads.left(a, own * 16, other * 16, at.lane);
    writes.left(c, own * 16, other * 16, at.lane);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      column.right(b, other * 16, at.col + n * 16, at.lane);
      multiply(d_q[2 * n], a, b[0], b[1]);
      multiply(d_q[2 * n + 1], a, b[2], b[3]);
      multiply(d_neg_k[2 * n], c, b[0], b[1]);
      multiply(d_neg_k[2 * n + 1], c, b[2], b[3]);
    }
  };
  const auto look_ahead = [&](int other) {
    reads.left_transposed(a, other * 16, own * 16, at.lane);
    add_step(d_column, a, q, other * 16, at);
    writes.left_transposed(a, other * 16, own * 16, at.lane);
    add_step(d_column, a, neg_k, other * 16, at);
  };
  const float* since = nullptr;
  for (int other = 0; other < own; ++other) {
    decay_columns(d_q, d_neg_k, s.kappa[other], since, at);
    look_back(other);
    since = s.kappa[other];
  }
  decay_columns(d_q, d_neg_k, s.rho[own], since, at);
  const float* until = s.rho[4];
  for (int other = 3; other > own; --other) {
    decay_columns(d_column, until, s.rho[other], at);
    look_ahead(other);
    until = s.rho[other];
  }
  decay_columns(d_column, until, s.kappa[own], at);
  if (!kPairs || !s.wide(own)) {
    look_back(own);
    look_ahead(own);
  }
}

/// Normalised q (which 0) or k (1), two channels.
template <int kD>
FURLONG_DEVICE float2 normalised(const Inputs& in, const ChunkEntry& chunk, int h, const DecayScratch<kD>& s, int which,
                                 int row, int d) {
  const float2 x = unpack(word_at(bf16_rows(which == 0 ? in.q_NHK : in.k_NHK, chunk.first + row, h) + d));
  const float norm = s.norm[which][row];
  return {x.x * norm, x.y * norm};
}

/// The pairs of a block that forgets too much for factors: adds to d_q, d_k, d_G of this thread's rows and to the
/// d_beta sums.
template <int kD>
FURLONG_DEVICE void add_pairs(const Inputs& in, const ChunkEntry& chunk, int h, const FinishTiles<kD>& mem,
                              const Place& at, float (&d_q)[4][4], float (&d_k)[4][4], float (&d_g)[4][4],
                              float (&row_beta)[2]) {
  using At = FinishShared<kD>;
  const DecayScratch<kD>& s = mem.decays();
  const auto score = [&](int offset, int i, int j) {
    const float2 pair = unpack(mem.square(offset).word(i, j & ~1));
    return (j & 1) != 0 ? pair.y : pair.x;
  };
  for (int r = 0; r < 2; ++r) {
    const int own = at.row(r);
    if (own >= chunk.rows) continue;
    for (int other = at.block * 16; other < at.block * 16 + 16 && other < chunk.rows; ++other) {
      const int i = own > other ? own : other, j = own > other ? other : own;
      const float read = in.scale * score(At::kReads, i, j), write = i == j ? 0.0f : score(At::kWrites, i, j);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int d = at.channel(n);
        const float2 f = decay_between(mem.logs().at(i, d), mem.logs().at(j, d));
        const float2 q = normalised(in, chunk, h, s, 0, i, d), k = normalised(in, chunk, h, s, 1, i, d);
        const float2 seen = normalised(in, chunk, h, s, 1, j, d);
        const float2 x{seen.x * f.x, seen.y * f.y};
        const float2 reader{read * q.x - s.beta[i] * write * k.x, read * q.y - s.beta[i] * write * k.y};
        if (own == i) {
          d_q[n][2 * r] += read * x.x;
          d_q[n][2 * r + 1] += read * x.y;
          d_k[n][2 * r] -= s.beta[i] * write * x.x;
          d_k[n][2 * r + 1] -= s.beta[i] * write * x.y;
          row_beta[r] += write * (k.x * x.x + k.y * x.y);
        }
        if (own == j) {
          d_k[n][2 * r] += reader.x * f.x;
          d_k[n][2 * r + 1] += reader.y * f.y;
        }
        if (i != j) {
          const float sign = own == i ? 1.0f : -1.0f;
          d_g[n][2 * r] += sign * reader.x * x.x;
          d_g[n][2 * r + 1] += sign * reader.y * x.y;
        }
      }
    }
  }
}

/// Sums over the channels of each row, this warp's share: y . d_y of q and of k, and the keys' part of d_beta.
struct RowSums {
  float q[2], k[2], beta[2];
};

/// From the gradients of the decayed operands to those of the normalised q (in d_q) and k (in d_neg_k) and of G
/// (in d_column).
template <int kD, bool kPairs>
FURLONG_DEVICE RowSums undo_decays(const Inputs& in, const ChunkEntry& chunk, int h, const FinishTiles<kD>& mem,
                                   const Place& at, const uint32_t (&raw_k)[2][4], float (&d_q)[4][4],
                                   float (&d_neg_k)[4][4], float (&d_column)[4][4]) {
  using At = FinishShared<kD>;
  const DecayScratch<kD>& s = mem.decays();
  const bool wide = kPairs && s.wide(at.block);
  RowSums sums{};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = at.row(r);
    const float beta = s.beta[row], norm = s.norm[1][row];
    float sum_beta = 0.0f;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int d = at.channel(n);
      float2 own = mem.logs().at(row, d), column;
      if (kPairs) {
        const float2 log = own;
        own = {exp2_fast(log.x), exp2_fast(log.y)};
        const float2 turn{s.kappa[at.block][d] - s.rho[at.block][d], s.kappa[at.block][d + 1] - s.rho[at.block][d + 1]};
        column = {exp2_fast(turn.x - log.x), exp2_fast(turn.y - log.y)};
      } else {
        column = {reciprocal(own.x), reciprocal(own.y)};
      }
      const float2 q = unpack(mem.tile(At::kQ).word(row, d)), neg_k = unpack(mem.tile(At::kNegK).word(row, d));
      const float2 c = unpack(mem.tile(At::kColumn).word(row, d)), k = unpack(raw_k[r][n]);
      float& qx = d_q[n][2 * r];
      float& qy = d_q[n][2 * r + 1];
      float& kx = d_neg_k[n][2 * r];
      float& ky = d_neg_k[n][2 * r + 1];
      float& gx = d_column[n][2 * r];
      float& gy = d_column[n][2 * r + 1];
      const float2 of_q{q.x * qx, q.y * qy}, of_row{neg_k.x * kx, neg_k.y * ky}, of_column{c.x * gx, c.y * gy};
      const float2 row_k{own.x * kx, own.y * ky};
      sum_beta += k.x * row_k.x + k.y * row_k.y;
      sums.q[r] += of_q.x + of_q.y;
      sums.k[r] += of_row.x + of_column.x + of_row.y + of_column.y;
      qx *= in.scale * own.x;
      qy *= in.scale * own.y;
      kx = column.x * gx - beta * row_k.x;
      ky = column.y * gy - beta * row_k.y;
      gx = of_q.x + of_row.x - of_column.x;
      gy = of_q.y + of_row.y - of_column.y;
    }
    sums.beta[r] = norm * sum_beta;
  }
  if (wide) {
    add_pairs(in, chunk, h, mem, at, d_q, d_neg_k, d_column, sums.beta);
    for (int r = 0; r < 2; ++r) {
      sums.q[r] = sums.k[r] = 0.0f;
      if (at.row(r) >= chunk.rows) continue;
      for (int n = 0; n < 4; ++n) {
        const float2 q = normalised(in, chunk, h, s, 0, at.row(r), at.channel(n));
        const float2 k = normalised(in, chunk, h, s, 1, at.row(r), at.channel(n));
        sums.q[r] += q.x * d_q[n][2 * r] + q.y * d_q[n][2 * r + 1];
        sums.k[r] += k.x * d_neg_k[n][2 * r] + k.y * d_neg_k[n][2 * r + 1];
      }
    }
  }
  return sums;
}

/// Leaves d_G in place of the decays, and the sums of the rows as [3][shares][64].
template <int kD>
FURLONG_DEVICE void share_rows(const FinishTiles<kD>& mem, const Place& at, const RowSums& sums,
                               const float (&d_g)[4][4]) {
  constexpr int kShares = kD / 32;
  float* shared = mem.floats(FinishShared<kD>::kWrites);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = at.row(r);
#pragma unroll
    for (int n = 0; n < 4; ++n) mem.logs().at(row, at.channel(n)) = {d_g[n][2 * r], d_g[n][2 * r + 1]};
    const float q = quad_sum(sums.q[r]), k = quad_sum(sums.k[r]), beta = quad_sum(sums.beta[r]);
    if ((at.lane & 3) == 0) {
      shared[at.share * 64 + row] = q;
      shared[(kShares + at.share) * 64 + row] = k;
      shared[(2 * kShares + at.share) * 64 + row] = beta;
    }
  }
}

/// d_q (which 0) or d_k (1) through the norm.
template <int kD>
FURLONG_DEVICE void store_rows(const BackwardArgs& args, const ChunkEntry& chunk, int h, const FinishTiles<kD>& mem,
                               const Place& at, int which, const uint32_t (&raw)[2][4], const float (&d_y)[4][4]) {
  constexpr int kShares = kD / 32;
  const float* sums = mem.floats(FinishShared<kD>::kWrites) + which * kShares * 64;
  uint32_t d_x[2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = at.row(r);
    const float norm = mem.decays().norm[which][row];
    float dot = 0.0f;
#pragma unroll
    for (int share = 0; share < kShares; ++share) dot += sums[share * 64 + row];
    dot = args.in.l2_norm ? dot * norm : 0.0f;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 x = unpack(raw[r][n]);
      d_x[r][n] = pack(norm * (d_y[n][2 * r] - x.x * dot), norm * (d_y[n][2 * r + 1] - x.y * dot));
    }
  }
  store_words<kD>(which == 0 ? args.d_q_NHK : args.d_k_NHK, d_x, chunk, static_cast<int>(args.in.heads), h, at);
}

template <int kD>
FURLONG_DEVICE void store_beta(const BackwardArgs& args, const ChunkEntry& chunk, int h, const FinishTiles<kD>& mem) {
  constexpr int kShares = kD / 32;
  const Inputs& in = args.in;
  const int row = thread_index();
  if (row >= chunk.rows) return;
  const float* keys = mem.floats(FinishShared<kD>::kWrites) + 2 * kShares * 64;
  const float* values = mem.floats(FinishShared<kD>::kRowBeta);
  float sum = 0.0f;
  for (int share = 0; share < kShares; ++share) sum += values[share * 64 + row] - keys[share * 64 + row];
  const float beta = mem.decays().beta[row];
  if (in.beta_is_logit) sum *= beta * (1.0f - beta);
  const int64_t n = (chunk.first + row) * in.heads + h;
  if (in.beta_NH.type == Element::kBFloat16) {
    static_cast<bf16*>(args.d_beta_NH)[n] = __float2bfloat16(sum);
  } else {
    static_cast<float*>(args.d_beta_NH)[n] = sum;
  }
}

/// From d_G to the gradient of the gate, by columns as in decayed_rows; z is the gate's input. Two barriers.
template <int kD, bool kAny>
FURLONG_DEVICE void store_gate(const BackwardArgs& args, const ChunkEntry& chunk, int64_t tile, int h,
                               const GradientWork& work, const FinishTiles<kD>& mem, const float2 (&z)[8]) {
  using At = FinishShared<kD>;
  const Inputs& in = args.in;
  DecayScratch<kD>& s = mem.decays();
  const int tid = thread_index(), half = tid / (kD / 2), d = tid % (kD / 2) * 2;
  float2 g[8];
  float2 sum{0, 0};
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const float2 own = mem.logs().at(half * 8 + i, d);
    sum = {sum.x + own.x, sum.y + own.y};
    g[i] = sum;
  }
  *reinterpret_cast<float2*>(&s.half_total[half][d]) = sum;
  sync_block();
  float2 later{0, 0};
#pragma unroll
  for (int part = 0; part < 5; ++part) {
    const float2 x = float_pair(mem.floats(At::kConstant) + part * kD, d);
    later = {later.x + x.x, later.y + x.y};
  }
#pragma unroll
  for (int other = 7; other > 0; --other) {
    if (other > half) {
      const float2 x = float_pair(s.half_total[other], d);
      later = {later.x + x.x, later.y + x.y};
    }
  }
  const Gate<kAny> gate(in, h, d);
  const int64_t first = (chunk.first * in.heads + h) * kD + d;
  const int step = static_cast<int>(in.heads) * kD;
  float2 sum_z{0, 0}, sum_a{0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = half * 8 + i;
    if (row >= chunk.rows) continue;
    const float2 d_g{g[i].x + later.x, g[i].y + later.y};
    const float2 d_z{gate.d_z(z[i].x, gate.bias.x, d_g.x), gate.d_z(z[i].y, gate.bias.y, d_g.y)};
    sum_z = {sum_z.x + d_z.x, sum_z.y + d_z.y};
    sum_a = {sum_a.x + gate.d_a_log(z[i].x, gate.bias.x, d_g.x, d_z.x),
             sum_a.y + gate.d_a_log(z[i].y, gate.bias.y, d_g.y, d_z.y)};
    const int64_t at = first + row * step;
    if (in.gate_NHK.type == Element::kBFloat16) {
      *reinterpret_cast<uint32_t*>(static_cast<bf16*>(args.d_gate_NHK) + at) = pack(d_z.x, d_z.y);
    } else {
      *reinterpret_cast<float2*>(static_cast<float*>(args.d_gate_NHK) + at) = d_z;
    }
  }
  if (gate.form == GateForm::kGiven) return;
  float* sums = mem.floats(At::kReads);  // [2][8][D] over dP, which nobody needs any more
  *reinterpret_cast<float2*>(sums + half * kD + d) = sum_z;
  *reinterpret_cast<float2*>(sums + (8 + half) * kD + d) = sum_a;
  sync_block();
  if (tid < 2 * kD) {
    float total = 0.0f;
    for (int other = 0; other < 8; ++other) total += sums[(tid / kD * 8 + other) * kD + tid % kD];
    work.partial[tile * 2 * kD + tid] = total;
  }
}

template <int kD, bool kPairs>
FURLONG_KERNEL void FURLONG_BOUNDS(4 * kD, 1) gradient_finish(const BackwardArgs args, const GradientWork work) {
  using At = FinishShared<kD>;
  const Inputs& in = args.in;
  const int heads = static_cast<int>(in.heads), step_slot = grid_size_x() / heads, step_head = grid_size_x() % heads;
  const FinishTiles<kD> mem{shared_memory()};
  const Place at;
  struct Cursor {
    int slot, head;
    ChunkEntry chunk;
  };
  const auto seek = [&](int slot, int head) {
    Cursor next{slot, head, {}};
    while (next.slot < work.slots) {
      next.chunk = work.table_X[next.slot];
      if (next.chunk.rows > 0) break;
      next.slot += step_slot;
      next.head += step_head;
      if (next.head >= heads) next = {next.slot + 1, next.head - heads, {}};
    }
    return next;
  };
  const auto follow = [&](const Cursor& from) {
    const int head = from.head + step_head, carry = head >= heads ? 1 : 0;
    return seek(from.slot + step_slot + carry, head - carry * heads);
  };
  const auto tile_of = [&](const Cursor& cursor) { return static_cast<int64_t>(cursor.slot) * heads + cursor.head; };
  Cursor now = seek(block_index_x() / heads, block_index_x() % heads);
  if (now.slot < work.slots) fetch_chunk(args, work, now.chunk, tile_of(now), now.head, mem);
  while (now.slot < work.slots) {
    const ChunkEntry chunk = now.chunk;
    const int h = now.head;
    const int64_t tile = tile_of(now);
    load_tile<64, 64, 4 * kD, 64>(mem.square(At::kReads), work.inverse + tile * 64 * 64);
    copy_commit();
    DecayScratch<kD>& s = mem.decays();
    decayed_rows<kD, kPairs>(in, chunk, h, s, [&](int row, int d, const DecayedPair& x) {
      const float beta = s.beta[row];
      mem.tile(At::kQ).word(row, d) = pack(in.scale * x.q.x * x.row.x, in.scale * x.q.y * x.row.y);
      mem.tile(At::kNegK).word(row, d) = pack(-beta * x.k.x * x.row.x, -beta * x.k.y * x.row.y);
      mem.tile(At::kColumn).word(row, d) = pack(x.k.x * x.column.x, x.k.y * x.column.y);
      mem.logs().at(row, d) = kPairs ? x.log : x.row;
    });
    copy_wait<0>();
    sync_block();
    solve_values(args, chunk, h, mem, at);
    sync_block();
    score_gradients(mem);
    float d_q[4][4] = {}, d_neg_k[4][4] = {}, d_column[4][4] = {};
    state_products(mem, at, d_q, d_neg_k, d_column);
    sync_block();
    const Cursor next = follow(now);
    if (next.slot < work.slots) fetch_chunk(args, work, next.chunk, tile_of(next), next.head, mem);
    uint32_t raw_q[2][4], raw_k[2][4];
    own_words<kD>(raw_q, in.q_NHK, chunk, h, at);
    own_words<kD>(raw_k, in.k_NHK, chunk, h, at);
    score_products<kD, kPairs>(mem, at, d_q, d_neg_k, d_column);
    const RowSums sums = undo_decays<kD, kPairs>(in, chunk, h, mem, at, raw_k, d_q, d_neg_k, d_column);
    sync_block();
    share_rows(mem, at, sums, d_column);
    sync_block();
    float2 z[8];
    const int tid = thread_index();
    load_gate(z, in.gate_NHK, chunk, h, tid / (kD / 2) * 8, tid % (kD / 2) * 2);
    store_rows(args, chunk, h, mem, at, 0, raw_q, d_q);
    store_rows(args, chunk, h, mem, at, 1, raw_k, d_neg_k);
    store_beta(args, chunk, h, mem);
    store_gate<kD, kPairs>(args, chunk, tile, h, work, mem, z);
    sync_block();
    now = next;
  }
}

/// d_dt_bias and d_a_log: sums of the chunks' parts in a fixed order. 1024 threads; y = 0, 1: half the channels of
/// d_dt_bias, y = 2: d_a_log.
template <int kD>
FURLONG_KERNEL void gradient_gate_sums(const BackwardArgs args, const GradientWork work) {
  float* sums = reinterpret_cast<float*>(shared_memory());
  const int tid = thread_index(), h = block_index_x(), heads = static_cast<int>(args.in.heads);
  const bool bias = block_index_y() < 2;
  const int lanes = bias ? kD / 2 : kD, lane = tid % lanes, offset = (bias ? block_index_y() * kD / 2 : kD) + lane;
  const int step = block_size_x() / lanes;
  float sum = 0.0f;
  constexpr int kBatch = 8;
  for (int start = tid / lanes; start < work.slots; start += kBatch * step) {
    float part[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int slot = start + i * step;
      const bool used = slot < work.slots && work.table_X[slot].rows > 0;
      part[i] = used ? work.partial[(static_cast<int64_t>(slot) * heads + h) * 2 * kD + offset] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum += part[i];
  }
  sums[tid] = sum;
  sync_block();
  if (tid < lanes) {
    for (int other = 1; other < step; ++other) sum += sums[other * lanes + tid];
    if (bias) args.d_dt_bias_HK[h * kD + offset] = sum;
    sums[tid] = sum;
  }
  sync_block();
  if (tid == 0 && !bias) {
    float total = 0.0f;
    for (int d = 0; d < kD; ++d) total += sums[d];
    args.d_a_log_H[h] = total;
  }
}

/// The chunk of each slot: the sequence is the last one whose first slot is not past it.
FURLONG_KERNEL void gradient_table(const BackwardArgs args, const GradientWork work) {
  const int slot = block_index_x() * block_size_x() + thread_index();
  if (slot >= work.slots) return;
  int64_t low = 0, high = args.in.sequences - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (slot_of(args.in.offsets[middle], middle, 0) <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t begin = args.in.offsets[low], end = args.in.offsets[low + 1];
  const int64_t first = begin + (slot - slot_of(begin, low, 0)) * kGradientChunk;
  const int64_t left = end - first;
  const int rows = left <= 0 ? 0 : left < kGradientChunk ? static_cast<int>(left) : kGradientChunk;
  work.table_X[slot] = {first, rows, static_cast<int>(low)};
}

}  // namespace furlong::kda::cuda
