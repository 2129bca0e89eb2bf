// The part of one chunk that forward and backward share. Included once for each SIMD target.
//
//   R rows of the chunk (a multiple of 16)   K, V padded to multiples of 16
//   u_i = correction of row i: v_i less what the decayed state, with the rows before i written, recalls for k_i
//   written_i = beta_i u_i
//   G_i = sum of decay_log up to and including row i   c_I = G at the offset of row block I
//
// For rows i of block I and columns j of the same or an earlier block, exp(G_i - G_j) = row_i * column_Ij with
//   row_i     = exp(G_i - c_I)
//   column_Ij = exp(c_I - G_j)
// c_I is G at the block's middle row. Where a block forgets too much for that (an unbounded gate), c_I is G at the
// block's start, all factors stay at or below 1, and the block's own square is summed pair by pair.

#if defined(FURLONG_OPS_KDA_CPU_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURLONG_OPS_KDA_CPU_CHUNK_INL_H_
#undef FURLONG_OPS_KDA_CPU_CHUNK_INL_H_
#else
#define FURLONG_OPS_KDA_CPU_CHUNK_INL_H_
#endif

#include <algorithm>

#include "furlong/ops/common/rows-inl.h"
#include "furlong/ops/common/small_gemm-inl.h"
#include "furlong/ops/kda/cpu/args.h"
#include "furlong/ops/kda/cpu/scratch.h"
#include "furlong/ops/kda/cpu/team.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace furlong::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using kda::ChunkScratch;
using kda::kBlockRows;

// Widest half of a block, in nats, that the middle offset may carry: 8 rows of a gate bounded by -5 need 40. The masked
// half of a block's square then reaches exp(84), still below fp32's exp(88.7).
constexpr float kMaxHalfSpan = 42.0f;
constexpr int64_t kMiddle = kBlockRows / 2 - 1;

/// Block I: row, before (exp(c_I - G at the block's start)), own columns, to_end and total, with the middle offset.
/// False if the block forgets too much for it.
HWY_INLINE bool middle_factors(const ChunkScratch& s, int64_t block) {
  const hn::ScalableTag<float> f32;
  const int64_t K = s.K;
  const float* g = s.g + block * kBlockRows * K;
  float* row = s.row + block * kBlockRows * K;
  float* column = s.column(block) + block * kBlockRows * K;
  float* to_end = s.to_end + block * kBlockRows * K;
  auto widest = hn::Zero(f32);
  for (int64_t d = 0; d < K; d += hn::Lanes(f32)) {
    auto below = hn::Zero(f32);  // c - G, falling back from the middle row to the first
    for (int64_t i = kMiddle; i > 0; --i) below = hn::Sub(below, hn::LoadU(f32, g + i * K + d));
    auto to_middle = hn::Sub(hn::LoadU(f32, g + d), below);
    widest = hn::Max(widest, below);
    auto above = hn::Zero(f32);
    for (int64_t i = kMiddle + 1; i < kBlockRows; ++i) above = hn::Add(above, hn::LoadU(f32, g + i * K + d));
    widest = hn::Max(widest, hn::Neg(above));
    const auto end = hn::Exp(f32, above);
    const auto before = hn::Exp(f32, to_middle);
    hn::StoreU(before, f32, s.to_offset + block * K + d);
    hn::StoreU(hn::Mul(before, end), f32, s.total + block * K + d);
    const auto put = [&](int64_t i, hn::Vec<decltype(f32)> distance) HWY_ATTR {
      const auto factor = hn::Exp(f32, distance);
      const auto inverse = hn::Div(hn::Set(f32, 1.0f), factor);
      hn::StoreU(factor, f32, row + i * K + d);
      hn::StoreU(inverse, f32, column + i * K + d);
      hn::StoreU(hn::Mul(inverse, end), f32, to_end + i * K + d);
    };
    auto distance = hn::Zero(f32);
    for (int64_t i = kMiddle; i >= 0; --i) {
      put(i, distance);
      distance = hn::Sub(distance, hn::LoadU(f32, g + i * K + d));
    }
    distance = hn::Zero(f32);
    for (int64_t i = kMiddle + 1; i < kBlockRows; ++i) {
      distance = hn::Add(distance, hn::LoadU(f32, g + i * K + d));
      put(i, distance);
    }
  }
  return hn::GetLane(hn::MaxOfLanes(f32, widest)) <= kMaxHalfSpan;
}

/// The same with the offset at the block's start; the block's own columns are zero.
HWY_INLINE void start_factors(const ChunkScratch& s, int64_t block) {
  const hn::ScalableTag<float> f32;
  const int64_t K = s.K;
  const float* g = s.g + block * kBlockRows * K;
  float* row = s.row + block * kBlockRows * K;
  float* column = s.column(block) + block * kBlockRows * K;
  float* to_end = s.to_end + block * kBlockRows * K;
  for (int64_t d = 0; d < K; d += hn::Lanes(f32)) {
    auto sum = hn::Zero(f32);
    for (int64_t i = 0; i < kBlockRows; ++i) {
      sum = hn::Add(sum, hn::LoadU(f32, g + i * K + d));
      hn::StoreU(hn::Exp(f32, sum), f32, row + i * K + d);
      hn::StoreU(hn::Zero(f32), f32, column + i * K + d);
    }
    hn::StoreU(hn::Set(f32, 1.0f), f32, s.to_offset + block * K + d);
    hn::StoreU(hn::Exp(f32, sum), f32, s.total + block * K + d);
    sum = hn::Zero(f32);
    for (int64_t i = kBlockRows - 1; i >= 0; --i) {
      hn::StoreU(hn::Exp(f32, sum), f32, to_end + i * K + d);
      sum = hn::Add(sum, hn::LoadU(f32, g + i * K + d));
    }
  }
}

/// Everything that depends on decay_log alone. to_end ends as exp(G at the chunk's end - G_i), start as exp(c_I)
/// counted from the chunk's start, whole as exp(G at the chunk's end).
HWY_INLINE void decay_factors(const ChunkScratch& s, int64_t blocks) {
  const hn::ScalableTag<float> f32;
  const int64_t K = s.K;
  for (int64_t block = 0; block < blocks; ++block) {
    s.pairwise[block] = !middle_factors(s, block);
    if (s.pairwise[block]) start_factors(s, block);
  }
  for (int64_t d = 0; d < K; d += hn::Lanes(f32)) {
    auto start = hn::Set(f32, 1.0f);
    for (int64_t block = 0; block < blocks; ++block) {
      const auto to_offset = hn::LoadU(f32, s.to_offset + block * K + d);
      const auto total = hn::LoadU(f32, s.total + block * K + d);
      hn::StoreU(hn::Mul(start, to_offset), f32, s.start + block * K + d);
      start = hn::Mul(start, total);
      for (int64_t j = 0; j < block * kBlockRows; ++j) {
        float* to_end = s.to_end + j * K + d;
        const auto until = hn::LoadU(f32, to_end);
        hn::StoreU(hn::Mul(until, to_offset), f32, s.column(block) + j * K + d);
        hn::StoreU(hn::Mul(until, total), f32, to_end);
      }
    }
    hn::StoreU(start, f32, s.whole + d);
  }
}

/// q and k under their decays:
///   from_start [2R, K]: scale q exp(G), then k exp(G)      at_end [R, K]: k exp(G at the end - G)
///   left_I [32, K]: scale q row, then -k row                right_I [16 (I + 1), K]: k column
/// With kShared the first two are for other cores and go past the caches, see share_keys.
template <bool kShared>
HWY_INLINE void decayed_inputs(const ChunkScratch& s, int64_t blocks, float scale) {
  const hn::ScalableTag<float> f32;
  const auto put = [&](hn::Vec<decltype(f32)> x, float* to) HWY_ATTR {
    if constexpr (kShared) {
      hn::Stream(x, f32, to);
    } else {
      hn::StoreU(x, f32, to);
    }
  };
  const int64_t K = s.K, rows = blocks * kBlockRows;
  for (int64_t i = 0; i < rows; ++i) {  // a row of each result at a time: streams prefer whole lines in a row
    const int64_t block = i / kBlockRows;
    float* left_q = s.left(block) + (i % kBlockRows) * K;
    float* left_k = left_q + kBlockRows * K;
    const float* start = s.start + block * K;
    for (int64_t d = 0; d < K; d += hn::Lanes(f32)) {
      const auto q = hn::Mul(hn::Set(f32, scale), hn::LoadU(f32, s.q + i * K + d));
      const auto q_row = hn::Mul(q, hn::LoadU(f32, s.row + i * K + d));
      hn::StoreU(q_row, f32, left_q + d);
      put(hn::Mul(q_row, hn::LoadU(f32, start + d)), s.from_start + i * K + d);
    }
    for (int64_t d = 0; d < K; d += hn::Lanes(f32)) {
      const auto k_row = hn::Mul(hn::LoadU(f32, s.k + i * K + d), hn::LoadU(f32, s.row + i * K + d));
      hn::StoreU(hn::Neg(k_row), f32, left_k + d);
      put(hn::Mul(k_row, hn::LoadU(f32, start + d)), s.from_start + (rows + i) * K + d);
    }
    for (int64_t d = 0; d < K; d += hn::Lanes(f32)) {
      put(hn::Mul(hn::LoadU(f32, s.k + i * K + d), hn::LoadU(f32, s.to_end + i * K + d)), s.at_end + i * K + d);
    }
  }
  for (int64_t block = 0; block < blocks; ++block) {
    const float* column = s.column(block);
    float* right = s.right(block);
    for (int64_t n = 0; n < (block + 1) * kBlockRows * K; n += hn::Lanes(f32)) {
      hn::StoreU(hn::Mul(hn::LoadU(f32, s.k + n), hn::LoadU(f32, column + n)), f32, right + n);
    }
  }
}

/// Calls visit(i, j, decay [K]) for j <= i < 16 of a block, with decay = exp(G_i - G_j), the exponent summed between
/// the two rows and hence exact for any gate.
template <typename Visit>
HWY_INLINE void for_each_pair(const ChunkScratch& s, int64_t block, const Visit& visit) {
  const hn::ScalableTag<float> f32;
  const int64_t K = s.K, first = block * kBlockRows;
  for (int64_t j = 0; j < kBlockRows; ++j) {
    std::fill(s.pair_sum, s.pair_sum + K, 0.0f);
    for (int64_t i = j; i < kBlockRows; ++i) {
      for (int64_t d = 0; d < K; d += hn::Lanes(f32)) {
        auto sum = hn::LoadU(f32, s.pair_sum + d);
        if (i > j) sum = hn::Add(sum, hn::LoadU(f32, s.g + (first + i) * K + d));
        hn::StoreU(sum, f32, s.pair_sum + d);
        hn::StoreU(hn::Exp(f32, sum), f32, s.pair_decay + d);
      }
      visit(first + i, first + j);
    }
  }
}

/// The square of a block that the factors cannot express.
HWY_INLINE void pairwise_scores(const ChunkScratch& s, int64_t block, float scale) {
  const hn::ScalableTag<float> f32;
  for_each_pair(s, block, [&](int64_t i, int64_t j) HWY_ATTR {
    auto read = hn::Zero(f32), write = hn::Zero(f32);
    for (int64_t d = 0; d < s.K; d += hn::Lanes(f32)) {
      const auto k = hn::Mul(hn::LoadU(f32, s.k + j * s.K + d), hn::LoadU(f32, s.pair_decay + d));
      read = hn::MulAdd(hn::LoadU(f32, s.q + i * s.K + d), k, read);
      write = hn::MulAdd(hn::LoadU(f32, s.k + i * s.K + d), k, write);
    }
    float* scores = s.scores(block) + (i % kBlockRows) * s.score_stride + j;
    scores[0] = scale * hn::GetLane(hn::SumOfLanes(f32, read));
    scores[kBlockRows * s.score_stride] = -hn::GetLane(hn::SumOfLanes(f32, write));
  });
}

/// Zeroes what a row must not see: read scores of later rows, write scores of later rows and of the row itself.
HWY_INLINE void mask_scores(float* scores, int64_t block, int64_t stride) {
  for (int64_t i = 0; i < kBlockRows; ++i) {
    float* read = scores + i * stride + block * kBlockRows;
    float* write = read + kBlockRows * stride;
    std::fill(read + i + 1, read + kBlockRows, 0.0f);
    std::fill(write + i, write + kBlockRows, 0.0f);
  }
}

/// scores_I [32, 16 (I + 1)]: P (rows 0-15) and -a (rows 16-31) of row block I, with A = diag(beta) a.
HWY_INLINE void chunk_scores(const ChunkScratch& s, int64_t blocks, float scale) {
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t columns = (block + 1) * kBlockRows;
    transpose(columns, s.K, s.right(block), s.K, s.turned, columns);
    gemm<false>(2 * kBlockRows, columns, s.K, rows_of(s.left(block), s.K), s.turned, columns, s.scores(block),
                s.score_stride);
    if (s.pairwise[block]) pairwise_scores(s, block, scale);
    mask_scores(s.scores(block), block, s.score_stride);
  }
}

/// Solves inside one block: scaled = diag(beta) x with x_i += sum of a_ij scaled_j over the rows before i (kForward) or
/// of a_ji scaled_j over the rows after it, for some columns of rows `V` apart. A vector of columns stays in registers
/// throughout.
template <bool kForward>
HWY_INLINE void substitute(const float* a, int64_t stride, const float* beta, float* HWY_RESTRICT x,
                           float* HWY_RESTRICT scaled, int64_t V, int64_t columns) {
  const hn::ScalableTag<float> f32;
  using Vec = hn::Vec<decltype(f32)>;
  constexpr int kRows = kBlockRows;
  for (int64_t v = 0; v < columns; v += hn::Lanes(f32)) {
    Vec rows[kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) rows[i] = hn::LoadU(f32, x + i * V + v);
#pragma GCC unroll 16
    for (int step = 0; step < kRows; ++step) {
      const int j = kForward ? step : kRows - 1 - step;
      const Vec final_row = hn::Mul(hn::Set(f32, beta[j]), rows[j]);
      hn::StoreU(rows[j], f32, x + j * V + v);
      hn::StoreU(final_row, f32, scaled + j * V + v);
#pragma GCC unroll 16
      for (int other = step + 1; other < kRows; ++other) {
        const int i = kForward ? other : kRows - 1 - other;
        const auto factor = hn::Set(f32, kForward ? a[i * stride + j] : a[j * stride + i]);
        rows[i] = hn::MulAdd(factor, final_row, rows[i]);
      }
    }
  }
}

/// The corrections u and written = diag(beta) u, where u = x - a written: what each token's value adds to what the
/// state recalls when its turn comes. x arrives in s.correction.
HWY_INLINE void solve(const ChunkScratch& s, int64_t blocks) {
  for (int64_t block = 0; block < blocks; ++block) {
    const float* a = s.scores(block) + kBlockRows * s.score_stride;
    const int64_t first = block * kBlockRows;
    if (block > 0) {
      gemm<true>(kBlockRows, s.V, first, rows_of(a, s.score_stride), s.written, s.V, s.correction + first * s.V, s.V);
    }
    substitute<true>(a + first, s.score_stride, s.beta + first, s.correction + first * s.V, s.written + first * s.V,
                     s.V, s.V);
  }
}

/// r = (I + A)^-T x and d_v = diag(beta) r. x arrives in s.d_written, which becomes r.
HWY_INLINE void solve_transposed(const ChunkScratch& s, int64_t blocks, int64_t columns) {
  for (int64_t block = blocks - 1; block >= 0; --block) {
    const float* a = s.scores(block) + kBlockRows * s.score_stride;
    const int64_t first = block * kBlockRows;
    substitute<false>(a + first, s.score_stride, s.beta + first, s.d_written + first * s.V, s.d_v + first * s.V, s.V,
                      columns);
    if (block > 0) {
      gemm<true>(first, columns, kBlockRows, transposed(a, s.score_stride), s.d_v + first * s.V, s.V, s.d_written, s.V);
    }
  }
}

/// Asks for the rows of a later chunk, a few at each call, while products keep the core busy: rows of one head lie too
/// far apart for the hardware to foresee.
class RowPrefetch {
 public:
  template <typename T>
  void add(const T* first, int64_t stride, int64_t rows, int64_t columns) {
    spans_[count_++] = {reinterpret_cast<const char*>(first), stride * static_cast<int64_t>(sizeof(T)), rows,
                        columns * static_cast<int64_t>(sizeof(T))};
  }
  template <typename T>
  void add_keys(const kda::ChunkInputs<T>& in, int64_t h, int64_t first, int64_t rows) {
    add(in.q.at(first, h), in.q.token_stride, rows, in.size.key_size);
    add(in.k.at(first, h), in.k.token_stride, rows, in.size.key_size);
    add(in.decay_log.at(first, h), in.decay_log.token_stride, rows, in.size.key_size);
  }
  /// Asks for some `bytes` more, in whole rows.
  HWY_INLINE void some(int64_t bytes) {
    while (bytes > 0 && span_ < count_) {
      const Span& span = spans_[span_];
      const char* from = span.first + row_ * span.stride;
      for (int64_t byte = 0; byte < span.bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
      bytes -= span.bytes;
      if (++row_ == span.rows) row_ = 0, ++span_;
    }
  }

 private:
  struct Span {
    const char* first;
    int64_t stride, rows, bytes;
  };
  Span spans_[12];
  int count_ = 0, span_ = 0;
  int64_t row_ = 0;
};

inline int64_t row_blocks(int64_t rows) {
  return kda::round_up(rows, kBlockRows) / kBlockRows;
}

/// Rows of a chunk and what follows from them without values and state.
template <bool kShared = false, typename T>
HWY_INLINE void load_keys(const kda::ChunkInputs<T>& in, int64_t h, int64_t first, int64_t rows,
                          const ChunkScratch& s) {
  const int64_t blocks = row_blocks(rows), padded = blocks * kBlockRows;
  load_rows(in.q.at(first, h), in.q.token_stride, rows, in.size.key_size, s.q, padded, s.K);
  load_rows(in.k.at(first, h), in.k.token_stride, rows, in.size.key_size, s.k, padded, s.K);
  load_rows(in.decay_log.at(first, h), in.decay_log.token_stride, rows, in.size.key_size, s.g, padded, s.K);
  for (int64_t i = 0; i < padded; ++i) s.beta[i] = i < rows ? *in.beta.at(first + i, h) : 0.0f;
  const auto scale = static_cast<float>(in.size.scale);
  decay_factors(s, blocks);
  decayed_inputs<kShared>(s, blocks, scale);
  chunk_scores(s, blocks, scale);
}

/// Hands the keys of a chunk, made by load_keys in team.unshared(), to the team. Past the caches: another core holds
/// the lines of the slot, and to take each of them from it costs more than to fetch them from memory in good time,
/// which prefetch_shared does.
HWY_INLINE void share_keys(const kda::ChunkTeam& team, const ChunkScratch& s, int64_t chunk) {
  const ChunkScratch to = team.at(s, chunk);
  stream_rows(s.all_scores, s.score_stride, s.score_rows, s.score_stride, to.all_scores, s.score_stride);
  stream_rows(s.whole, s.K, 1, s.K, to.whole, s.K);
  stream_rows(s.beta, kda::kChunkRows, 1, kda::kChunkRows, to.beta, kda::kChunkRows);
  hwy::FlushStream();
}

HWY_INLINE void prefetch_shared(const kda::ChunkTeam& team, const ChunkScratch& s, int64_t chunk, RowPrefetch& ahead) {
  const ChunkScratch from = team.at(s, chunk);
  ahead.add(from.from_start, s.K, 2 * kda::kChunkRows, s.K);
  ahead.add(from.at_end, s.K, kda::kChunkRows, s.K);
  ahead.add(from.all_scores, s.score_stride, s.score_rows, s.score_stride);
}

}  // namespace furlong::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FURLONG_OPS_KDA_CPU_CHUNK_INL_H_
