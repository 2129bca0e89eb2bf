#pragma once

// First kernel of the gradient, one block a chunk and head: decays, scores, the inverse T = (I + A)^-1 and what the two
// recurrences read:  -W = -T beta (k exp(G)),  U = T beta v,  P^T d_out,  k exp(G_end - G),  scale q exp(G).

#include "furlong/ops/kda/cuda/backward_chunk.cuh"

namespace furlong::kda::cuda {

inline constexpr int kSquare = 68;  // row pitch of the fp32 squares

template <int kD, bool kPairs>
struct PrepareShared {
  static constexpr int kTileBytes = 64 * kD * 2;
  static constexpr int kScoreBytes = 2 * 64 * kSquare * 4 + 2 * 64 * 64 * 2;
  // The decayed operands of the scores make room for the scores and the inverse.
  static constexpr int kFirst = 3 * kTileBytes > kScoreBytes ? 3 * kTileBytes : kScoreBytes;
  static constexpr int kScratch = kFirst + 3 * kTileBytes;
  static constexpr int kLog = kScratch + static_cast<int>(sizeof(DecayScratch<kD>));
  static constexpr int kBytes = kLog + (kPairs ? 64 * kD * 4 : 0);
};

/// acc += a b of 16 x 16 fp32 squares, bf16 products of high and low halves: 2^-16 relative.
FURLONG_DEVICE void multiply_squares(float (&acc)[2][4], const float* a, const float* b, int lane) {
  const int group = lane >> 2, quad = lane & 3;
  uint32_t high[4], low[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float2 x = float_pair(a + (group + (r & 1) * 8) * kSquare, quad * 2 + (r >> 1) * 8);
    high[r] = pack(x.x, x.y);
    const float2 rounded = unpack(high[r]);
    low[r] = pack(x.x - rounded.x, x.y - rounded.y);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    uint32_t b_high[2], b_low[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* from = b + (quad * 2 + r * 8) * kSquare + n * 8 + group;
      const float x = from[0], y = from[kSquare];
      b_high[r] = pack(x, y);
      const float2 rounded = unpack(b_high[r]);
      b_low[r] = pack(x - rounded.x, y - rounded.y);
    }
    multiply(acc[n], low, b_high[0], b_high[1]);
    multiply(acc[n], high, b_low[0], b_low[1]);
    multiply(acc[n], high, b_high[0], b_high[1]);
  }
}

FURLONG_DEVICE void store_square(float* to, const float (&acc)[2][4], float sign, int lane) {
  const int group = lane >> 2, quad = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* row = to + (group + r * 8) * kSquare + n * 8 + quad * 2;
      *reinterpret_cast<float2*>(row) = {sign * acc[n][2 * r], sign * acc[n][2 * r + 1]};
    }
  }
}

/// t = (I + a)^-1 for a strictly lower triangular [64, 64]: substitution in 16-row blocks, then merges
/// T21 = -T22 A21 T11 to 32 and to 64 rows. The blocks of t above the diagonal are not written. Needs barriers before
/// and after.
FURLONG_DEVICE void invert(const float* a, float* t) {
  const int lane = thread_index() & 31, warp = thread_index() >> 5;
  const auto block = [](auto* x, int i, int j) { return x + i * 16 * kSquare + j * 16; };
  if (warp < 4) {
    const float* square = block(a, warp, warp);
    float* out = block(t, warp, warp);
    const int column = lane & 15;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float even = i == column ? 1.0f : 0.0f, odd = 0.0f;
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 row = *reinterpret_cast<const float4*>(square + i * kSquare + m);
        even -= row.x * x[m];
        if (m + 1 < i) odd -= row.y * x[m + 1];
        if (m + 2 < i) even -= row.z * x[m + 2];
        if (m + 3 < i) odd -= row.w * x[m + 3];
      }
      x[i] = even + odd;
    }
    if (lane < 16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) out[i * kSquare + column] = x[i];
    }
  }
  sync_block();
  if (warp < 2) {
    const int i = 2 * warp + 1, j = 2 * warp;
    float product[2][4] = {}, merged[2][4] = {};
    multiply_squares(product, block(a, i, j), block(t, j, j), lane);
    store_square(block(t, i, j), product, 1.0f, lane);
    sync_warp();
    multiply_squares(merged, block(t, i, i), block(t, i, j), lane);
    sync_warp();
    store_square(block(t, i, j), merged, -1.0f, lane);
  }
  sync_block();
  const int i = warp / 2, j = warp % 2;
  float product[2][4] = {}, merged[2][4] = {};
  if (warp < 4) {
    for (int m = j; m < 2; ++m) multiply_squares(product, block(a, 2 + i, m), block(t, m, j), lane);
    store_square(block(t, 2 + i, j), product, 1.0f, lane);
  }
  sync_block();
  if (warp < 4) {
    for (int m = 0; m <= i; ++m) multiply_squares(merged, block(t, 2 + i, 2 + m), block(t, 2 + m, j), lane);
  }
  sync_block();
  if (warp < 4) store_square(block(t, 2 + i, j), merged, -1.0f, lane);
}

/// Scores of one 16 x 16 block: left rows of block I, columns of block J.
template <int kD>
FURLONG_DEVICE void block_scores(float (&acc)[2][4], const Tile<kD>& left, const Tile<kD>& right,
                                 const DecayScratch<kD>& s, int row_block, int column_block, int lane) {
  const int quad = lane & 3;
#pragma unroll
  for (int k = 0; k < kD; k += 16) {
    uint32_t a[4], b[4];
    left.left(a, row_block * 16, k, lane);
    right.right_transposed(b, column_block * 16, k, lane);
    if (row_block != column_block) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int d = k + side * 8 + quad * 2;
        const float2 f = decay_between(float_pair(s.rho[row_block], d), float_pair(s.kappa[column_block], d));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 x = unpack(a[side * 2 + r]);
          a[side * 2 + r] = pack(x.x * f.x, x.y * f.y);
        }
      }
    }
    multiply(acc[0], a, b[0], b[1]);
    multiply(acc[1], a, b[2], b[3]);
  }
}

/// The square of a block that forgets too much for factors: sum over d of x_i k_j 2^(G_i - G_j) pair by pair.
template <int kD>
FURLONG_DEVICE float pair_score(const Inputs& in, const ChunkEntry& chunk, int h, const DecayScratch<kD>& s,
                                const FloatTile<kD>& logs, bool read, int i, int j) {
  if (j > i || i >= chunk.rows) return 0.0f;
  float sum = 0.0f;
  for (int d = 0; d < kD; d += 2) {
    const float2 x = unpack(word_at(bf16_rows(read ? in.q_NHK : in.k_NHK, chunk.first + i, h) + d));
    const float2 k = unpack(word_at(bf16_rows(in.k_NHK, chunk.first + j, h) + d));
    const float2 f = decay_between(logs.at(i, d), logs.at(j, d));
    sum += x.x * k.x * f.x + x.y * k.y * f.y;
  }
  return sum * s.norm[read ? 0 : 1][i] * s.norm[1][j] * (read ? in.scale : 1.0f);
}

/// Stores a 16 x 32 accumulator as bf16 into a row-major matrix of `stride` columns.
FURLONG_DEVICE void store_fragments(bf16* to, int stride, const float (&acc)[4][4], float sign, int row, int col,
                                    int lane) {
  const QuadPlace own(lane);
  bf16* at = to + (row + (lane >> 2) + own.row * 8) * stride + col + own.tile * 8;
#pragma unroll
  for (int n = 0; n < 4; n += 2) {
    uint32_t w[4] = {pack(sign * acc[n][0], sign * acc[n][1]), pack(sign * acc[n + 1][0], sign * acc[n + 1][1]),
                     pack(sign * acc[n][2], sign * acc[n][3]), pack(sign * acc[n + 1][2], sign * acc[n + 1][3])};
    transpose_quad(w, lane);
    *reinterpret_cast<uint4*>(at + n * 8) = uint4{w[0], w[1], w[2], w[3]};
  }
}

/// P (causal, bf16) and A (strictly causal, times beta, fp32) from the decayed operands, which they overwrite.
template <int kD, bool kPairs>
FURLONG_DEVICE void prepare_scores(const Inputs& in, const ChunkEntry& chunk, int h, const DecayScratch<kD>& s,
                                   const Tile<kD> (&operand)[3], const FloatTile<kD>& logs, float* a_square,
                                   const Tile<64>& p) {
  constexpr int kShare = kD / 64;  // warps that share the columns of a row block
  const int lane = thread_index() & 31, warp = thread_index() >> 5;
  const bool read = warp % 2 == 0;
  const int row_block = warp / 2 % 4, first = warp / 8;
  float acc[4 / kShare][2][4] = {};
#pragma unroll
  for (int n = 0; n < 4 / kShare; ++n) {
    const int column_block = first + n * kShare;
    if (column_block > row_block || (kPairs && column_block == row_block && s.wide(row_block))) continue;
    block_scores(acc[n], operand[read ? 0 : 1], operand[2], s, row_block, column_block, lane);
  }
  sync_block();
#pragma unroll
  for (int n = 0; n < 4 / kShare; ++n) {
    const int column_block = first + n * kShare;
    const bool pairs = kPairs && column_block == row_block && s.wide(row_block);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const int i = row_block * 16 + (lane >> 2) + (e & 2) * 4, j = column_block * 16 + (e >> 2) * 8 + (lane & 3) * 2;
      float low = acc[n][e >> 2][e & 2], high = acc[n][e >> 2][(e & 2) + 1];
      if (pairs) {
        low = pair_score(in, chunk, h, s, logs, read, i, j);
        high = pair_score(in, chunk, h, s, logs, read, i, j + 1);
      }
      const int seen = read ? i : i - 1;
      low = j <= seen ? low : 0.0f;
      high = j + 1 <= seen ? high : 0.0f;
      if (read) {
        p.word(i, j) = pack(low, high);
      } else {
        *reinterpret_cast<float2*>(a_square + i * kSquare + j) = {s.beta[i] * low, s.beta[i] * high};
      }
    }
  }
}

template <int kD, bool kPairs>
FURLONG_KERNEL void FURLONG_BOUNDS(4 * kD, kPairs ? 1 : 2)
    gradient_prepare(const BackwardArgs args, const GradientWork work) {
  using Shared = PrepareShared<kD, kPairs>;
  const Inputs& in = args.in;
  const int tid = thread_index(), lane = tid & 31, warp = tid >> 5;
  const int heads = static_cast<int>(in.heads), h = block_index_x() % heads;
  const ChunkEntry chunk = work.table_X[block_index_x() / heads];
  if (chunk.rows == 0) return;
  const int64_t tile = block_index_x();
  unsigned char* memory = shared_memory();
  const auto tile_at = [&](int offset) { return Tile<kD>{reinterpret_cast<bf16*>(memory + offset)}; };
  const Tile<kD> operand[3] = {tile_at(0), tile_at(Shared::kTileBytes), tile_at(2 * Shared::kTileBytes)};
  const Tile<kD> from_start = tile_at(Shared::kFirst), v = tile_at(Shared::kFirst + Shared::kTileBytes);
  const Tile<kD> d_out = tile_at(Shared::kFirst + 2 * Shared::kTileBytes);
  auto& s = *reinterpret_cast<DecayScratch<kD>*>(memory + Shared::kScratch);
  const FloatTile<kD> logs{reinterpret_cast<float*>(memory + Shared::kLog)};
  float* a_square = reinterpret_cast<float*>(memory);
  float* t_square = a_square + 64 * kSquare;
  const Tile<64> p{reinterpret_cast<bf16*>(t_square + 64 * kSquare)}, t_beta{p.data + 64 * 64};

  load_tile<64, kD, 4 * kD>(v, bf16_rows(in.v_NHV, chunk.first, h), in.v_NHV.token_stride, chunk.rows);
  load_tile<64, kD, 4 * kD>(d_out, bf16_rows(args.d_out_NHV, chunk.first, h), args.d_out_NHV.token_stride, chunk.rows);
  copy_commit();
  decayed_rows<kD, kPairs>(in, chunk, h, s, [&](int row, int d, const DecayedPair& x) {
    const int block = row / 16;
    const float2 start = decay_between(float_pair(s.rho[block], d), {0, 0});
    const float2 end = decay_between(float_pair(s.rho[4], d), float_pair(s.kappa[block], d));
    const float2 q{in.scale * x.q.x * x.row.x, in.scale * x.q.y * x.row.y};
    const float2 k{x.k.x * x.row.x, x.k.y * x.row.y}, column{x.k.x * x.column.x, x.k.y * x.column.y};
    operand[0].word(row, d) = pack(q.x, q.y);
    operand[1].word(row, d) = pack(k.x, k.y);
    operand[2].word(row, d) = pack(column.x, column.y);
    from_start.word(row, d) = pack(k.x * start.x, k.y * start.y);
    const int64_t at = tile * 64 * kD + row * kD + d;
    *reinterpret_cast<uint32_t*>(work.q_start + at) = pack(q.x * start.x, q.y * start.y);
    *reinterpret_cast<uint32_t*>(work.k_end + at) = pack(column.x * end.x, column.y * end.y);
    if (kPairs) logs.at(row, d) = x.log;
  });
  if (tid < kD) work.end[tile * kD + tid] = exp2_fast(s.rho[4][tid]);
  sync_block();
  prepare_scores<kD, kPairs>(in, chunk, h, s, operand, logs, a_square, p);
  sync_block();
  invert(a_square, t_square);
  copy_wait<0>();
  sync_block();
  for (int n = tid; n < 64 * 32; n += block_size_x()) {
    const int i = n / 32, j = n % 32 * 2;
    const bool below = j / 16 <= i / 16;
    const float2 x = below ? float_pair(t_square + i * kSquare, j) : float2{0, 0};
    *reinterpret_cast<uint32_t*>(work.inverse + tile * 64 * 64 + i * 64 + j) = pack(x.x, x.y);
    t_beta.word(i, j) = pack(x.x * s.beta[j], x.y * s.beta[j + 1]);
  }
  sync_block();

  const int m = warp % 4, col = warp / 4 * 32;
  float u[4][4] = {}, w[4][4] = {};
  for (int k = 0; k <= m; ++k) {
    uint32_t a[4], b[4];
    t_beta.left(a, m * 16, k * 16, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      v.right(b, k * 16, col + n * 16, lane);
      multiply(u[2 * n], a, b[0], b[1]);
      multiply(u[2 * n + 1], a, b[2], b[3]);
      from_start.right(b, k * 16, col + n * 16, lane);
      multiply(w[2 * n], a, b[0], b[1]);
      multiply(w[2 * n + 1], a, b[2], b[3]);
    }
  }
  store_fragments(work.values + tile * 64 * kD, kD, u, 1.0f, m * 16, col, lane);
  store_fragments(work.minus_w + tile * 64 * kD, kD, w, -1.0f, m * 16, col, lane);
  float d_v[4][4] = {};
  for (int k = m; k < 4; ++k) {
    uint32_t a[4], b[4];
    p.left_transposed(a, k * 16, m * 16, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      d_out.right(b, k * 16, col + n * 16, lane);
      multiply(d_v[2 * n], a, b[0], b[1]);
      multiply(d_v[2 * n + 1], a, b[2], b[3]);
    }
  }
  store_fragments(work.d_values + tile * 64 * kD, kD, d_v, 1.0f, m * 16, col, lane);
}

}  // namespace furlong::kda::cuda
