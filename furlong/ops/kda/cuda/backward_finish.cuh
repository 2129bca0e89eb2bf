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

#include "furlong/ops/kda/cuda/backward_store.cuh"

namespace furlong::kda::cuda {

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

/// r in place of d_w; d_v; the part of d_beta through the values. One barrier inside, none after.
template <int kD>
FURLONG_DEVICE void solve_values(const BackwardArgs& args, const ChunkEntry& chunk, int h, const FinishTiles<kD>& mem,
                                 const Place& at, const OwnWords<kD>& own_v) {
  using At = FinishShared<kD>;
  const DecayScratch<kD>& s = mem.decays();
  const Tile<kD> d_w = mem.tile(At::kR);
  float r[4][4] = {};
  for (int k = at.block; k < 4; ++k) {
    uint32_t a[4];
    mem.square(At::kReads).left_transposed(a, k * 16, at.block * 16, at.lane);
    add_step(r, a, d_w, k * 16, at);
  }
  sync_block();
  uint32_t d_v[2][4], values[2][4];
  own_v.turn(values, at.lane);
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
  const auto peek = [&](int slot) { return slot < work.slots ? work.table_X[slot] : ChunkEntry{0, 1, 0}; };
  const auto step_on = [&](const Cursor& from) {
    const int head = from.head + step_head, carry = head >= heads ? 1 : 0;
    return Cursor{from.slot + step_slot + carry, head - carry * heads, {}};
  };
  // The entry is fetched as soon as the slot is known and looked at later.
  const auto skip_empty = [&](Cursor cursor) {
    while (cursor.chunk.rows == 0) {
      cursor = step_on(cursor);
      cursor.chunk = peek(cursor.slot);
    }
    return cursor;
  };
  const auto tile_of = [&](const Cursor& cursor) { return static_cast<int64_t>(cursor.slot) * heads + cursor.head; };
  Cursor now{block_index_x() / heads, block_index_x() % heads, {}};
  now.chunk = peek(now.slot);
  now = skip_empty(now);
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
    OwnWords<kD> own_v, own_q, own_k;
    own_v.fetch(in.v_NHV, chunk, h, at);
    copy_wait<0>();
    sync_block();
    solve_values(args, chunk, h, mem, at, own_v);
    sync_block();
    score_gradients(mem);
    Cursor next = step_on(now);
    next.chunk = peek(next.slot);
    float d_q[4][4] = {}, d_neg_k[4][4] = {}, d_column[4][4] = {};
    state_products(mem, at, d_q, d_neg_k, d_column);
    sync_block();
    next = skip_empty(next);
    if (next.slot < work.slots) fetch_chunk(args, work, next.chunk, tile_of(next), next.head, mem);
    own_q.fetch(in.q_NHK, chunk, h, at);
    own_k.fetch(in.k_NHK, chunk, h, at);
    score_products<kD, kPairs>(mem, at, d_q, d_neg_k, d_column);
    uint32_t raw_q[2][4], raw_k[2][4];
    own_k.turn(raw_k, at.lane);
    const RowSums sums = undo_decays<kD, kPairs>(in, chunk, h, mem, at, raw_k, d_q, d_neg_k, d_column);
    sync_block();
    share_rows(mem, at, sums, d_column);
    sync_block();
    float2 z[8];
    const int tid = thread_index();
    load_gate(z, in.gate_NHK, chunk, h, tid / (kD / 2) * 8, tid % (kD / 2) * 2);
    own_q.turn(raw_q, at.lane);
    store_rows(args, chunk, h, mem, at, 0, raw_q, d_q);
    store_rows(args, chunk, h, mem, at, 1, raw_k, d_neg_k);
    store_beta(args, chunk, h, mem);
    store_gate<kD, kPairs>(args, chunk, tile, h, work, mem, z);
    sync_block();
    now = next;
  }
}

}  // namespace furlong::kda::cuda
