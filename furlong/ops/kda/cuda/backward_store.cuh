#pragma once

// The last part of the gradient's last kernel: its shared memory, and the way from the gradients of decayed operands to
// those of the inputs. Names as at the top of cuda/backward_finish.cuh.

#include "furlong/ops/kda/cuda/backward_chunk.cuh"

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

/// This thread's words of a tensor's chunk, rows past the last one repeating it: fetched early, turned when needed.
template <int kD>
struct OwnWords {
  uint4 raw[2];

  FURLONG_DEVICE void fetch(const Rows& from, const ChunkEntry& chunk, int h, const Place& at) {
    const QuadPlace own(at.lane);
    const int row = at.row(own.row) < chunk.rows ? at.row(own.row) : chunk.rows - 1;
    const bf16* head =
        bf16_rows(from, chunk.first, h) + row * static_cast<int>(from.token_stride) + at.col + own.tile * 8;
    raw[0] = *reinterpret_cast<const uint4*>(head);
    raw[1] = *reinterpret_cast<const uint4*>(head + 16);
  }
  FURLONG_DEVICE void turn(uint32_t (&x)[2][4], int lane) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t w[4] = {raw[n].x, raw[n].y, raw[n].z, raw[n].w};
      transpose_quad(w, lane);
      x[0][2 * n] = w[0];
      x[0][2 * n + 1] = w[1];
      x[1][2 * n] = w[2];
      x[1][2 * n + 1] = w[3];
    }
  }
};

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

}  // namespace furlong::kda::cuda
