// kda_chunk on the CPU, gradient: the chunks of a sequence in reverse, each recomputed from the inputs and the state
// that entered it; u was kept. Shapes and names as in cpu/chunk-inl.h; d_x is the gradient of x.
//
// With -a for the write scores, u = x - a written and written = diag(beta) u, so
//   d_written  = P^T d_out + at_end d_S
//   r          = d_written - a^T diag(beta) r    the gradient of u
//   d_v        = diag(beta) r                    d_beta = r . u
//   d(-a)      = StrictTril(d_v written^T)       dP = Tril(d_out written^T)
// and both products with the entering state S share one stacked operand, residual = [d_out; -d_v]:
//   d_from_start = residual S^T                  d_S <- diag(exp(G_end)) d_S + from_start^T residual
// P and -a are products left right^T of decayed inputs; every decayed input x exp(s G) gives its d_x exp(s G) to x and
// s x exp(s G) d_x to G.

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/kda/cpu/backward.cpp"
#include "hwy/foreach_target.h"
// clang-format: the line above must come first.
#include <type_traits>

#include "furlong/ops/kda/cpu/chunk-inl.h"
#include "furlong/ops/kda/cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace furlong::HWY_NAMESPACE {

/// A row's read of its own key meets no decay: its score moves from d_scores to d_diagonal. Left in, it would enter the
/// gradient of G twice with opposite signs, and its rounding would drown the gradients of strong decays.
HWY_INLINE void take_diagonal(const ChunkScratch& s, int64_t block) {
  for (int64_t i = 0; i < kBlockRows; ++i) {
    float& d_read = s.d_score(block)[i * s.score_stride + block * kBlockRows + i];
    s.d_diagonal[block * kBlockRows + i] = d_read;
    d_read = 0.0f;
  }
}

/// written = diag(beta) u.
HWY_INLINE void scale_corrections(const ChunkScratch& s, int64_t rows) {
  const hn::ScalableTag<float> f32;
  for (int64_t i = 0; i < rows; ++i) {
    const auto beta = hn::Set(f32, s.beta[i]);
    for (int64_t n = i * s.V; n < (i + 1) * s.V; n += hn::Lanes(f32)) {
      hn::StoreU(hn::Mul(beta, hn::LoadU(f32, s.correction + n)), f32, s.written + n);
    }
  }
}

/// r, in d_written, d_v and the lower half of residual: the first `columns` of them, from d_state at the chunk's end.
template <typename Between>
HWY_INLINE void value_gradients(const ChunkScratch& s, int64_t blocks, int64_t columns, const Between& between) {
  const hn::ScalableTag<float> f32;
  const int64_t rows = blocks * kBlockRows, V = s.V;
  gemm<false>(rows, columns, s.K, rows_of(s.at_end, s.K), s.d_state, V, s.d_written, V, between);
  for (int64_t block = 0; block < blocks; ++block) {
    gemm<true>((block + 1) * kBlockRows, columns, kBlockRows, transposed(s.scores(block), s.score_stride),
               s.residual + block * kBlockRows * V, V, s.d_written, V);
  }
  solve_transposed(s, blocks, columns);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t v = 0; v < columns; v += hn::Lanes(f32)) {
      hn::StoreU(hn::Neg(hn::LoadU(f32, s.d_v + i * V + v)), f32, s.residual + (rows + i) * V + v);
    }
  }
}

/// `columns` of d_state at the chunk's start into `to`, which may be d_state.
template <typename Between>
HWY_INLINE void move_gradient(const ChunkScratch& s, int64_t blocks, int64_t columns, float* to,
                              const Between& between) {
  gemm_onto<Onto::kScaledRows>(s.K, columns, 2 * blocks * kBlockRows, transposed(s.from_start, s.K), s.residual, s.V,
                               Base{s.d_state, s.V, s.whole}, to, s.V, between);
}

/// d_scores and d_beta.
HWY_INLINE void score_gradients(const ChunkScratch& s, int64_t blocks) {
  const hn::ScalableTag<float> f32;
  const int64_t rows = blocks * kBlockRows, V = s.V;
  transpose(rows, V, s.written, V, s.turned, rows);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t columns = (block + 1) * kBlockRows, row = block * kBlockRows * V;
    float* d_read = s.d_score(block);
    float* d_write = d_read + kBlockRows * s.score_stride;
    gemm<false>(kBlockRows, columns, V, rows_of(s.residual + row, V), s.turned, rows, d_read, s.score_stride);
    gemm<false>(kBlockRows, columns, V, rows_of(s.d_v + row, V), s.turned, rows, d_write, s.score_stride);
    mask_scores(d_read, block, s.score_stride);
    take_diagonal(s, block);
  }
  for (int64_t i = 0; i < rows; ++i) {
    auto d_beta = hn::Zero(f32);
    for (int64_t n = i * V; n < (i + 1) * V; n += hn::Lanes(f32)) {
      d_beta = hn::MulAdd(hn::LoadU(f32, s.d_written + n), hn::LoadU(f32, s.correction + n), d_beta);
    }
    s.d_beta[i] = hn::GetLane(hn::SumOfLanes(f32, d_beta));
  }
}

/// d_from_start, d_at_end, end_sum = diag(exp(G_end)) sum over v of S d_S.
template <typename Between>
HWY_INLINE void state_gradients(const ChunkScratch& s, int64_t blocks, const Between& between) {
  const hn::ScalableTag<float> f32;
  const int64_t rows = blocks * kBlockRows, K = s.K, V = s.V;
  transpose(K, V, s.entering, V, s.state_turned, K);
  gemm<false>(2 * rows, K, V, rows_of(s.residual, V), s.state_turned, K, s.d_from_start, K, between);
  transpose(K, V, s.d_state, V, s.turned, K);
  gemm<false>(rows, K, V, rows_of(s.written, V), s.turned, K, s.d_at_end, K, between);
  for (int64_t d = 0; d < K; d += hn::Lanes(f32)) {
    auto sum = hn::Zero(f32);
    for (int64_t v = 0; v < V; ++v) {
      sum = hn::MulAdd(hn::LoadU(f32, s.state_turned + v * K + d), hn::LoadU(f32, s.turned + v * K + d), sum);
    }
    hn::StoreU(hn::Mul(sum, hn::LoadU(f32, s.whole + d)), f32, s.end_sum + d);
  }
}

/// d_q, d_k, d_g (still the gradient of G) of the inputs as they meet the state and their own row. d_at_end becomes
/// what each row gives to the gradient of (G at the end - G_i).
HWY_INLINE void gather_state_side(const ChunkScratch& s, int64_t blocks, float scale) {
  const hn::ScalableTag<float> f32;
  const int64_t K = s.K, rows = blocks * kBlockRows;
  for (int64_t i = 0; i < rows; ++i) {
    const float* start_row = s.start + i / kBlockRows * K;
    const auto own = hn::Set(f32, scale * s.d_diagonal[i]);
    for (int64_t d = 0; d < K; d += hn::Lanes(f32)) {
      const int64_t n = i * K + d;
      const auto decay = hn::Mul(hn::LoadU(f32, s.row + n), hn::LoadU(f32, start_row + d));
      const auto d_q = hn::LoadU(f32, s.d_from_start + n), d_k = hn::LoadU(f32, s.d_from_start + rows * K + n);
      const auto d_end = hn::LoadU(f32, s.d_at_end + n);
      const auto q = hn::LoadU(f32, s.q + n), k = hn::LoadU(f32, s.k + n);
      hn::StoreU(hn::MulAdd(hn::Mul(hn::Set(f32, scale), decay), d_q, hn::Mul(own, k)), f32, s.d_q + n);
      const auto d_k_end = hn::MulAdd(hn::LoadU(f32, s.to_end + n), d_end, hn::Mul(own, q));
      hn::StoreU(hn::MulAdd(decay, d_k, d_k_end), f32, s.d_k + n);
      const auto from_start =
          hn::MulAdd(hn::LoadU(f32, s.from_start + n), d_q, hn::Mul(hn::LoadU(f32, s.from_start + rows * K + n), d_k));
      hn::StoreU(from_start, f32, s.d_g + n);
      hn::StoreU(hn::Mul(hn::LoadU(f32, s.at_end + n), d_end), f32, s.d_at_end + n);
    }
  }
}

/// Adds what the scores of row block I give to its own rows: left = [scale q row; -k row].
HWY_INLINE void gather_left(const ChunkScratch& s, int64_t block, float scale) {
  const hn::ScalableTag<float> f32;
  const int64_t K = s.K;
  const float* left = s.left(block);
  for (int64_t i = 0; i < kBlockRows; ++i) {
    const int64_t row = block * kBlockRows + i;
    for (int64_t d = 0; d < K; d += hn::Lanes(f32)) {
      const int64_t n = row * K + d, q = i * K + d, k = (kBlockRows + i) * K + d;
      const auto factor = hn::LoadU(f32, s.row + n);
      const auto d_q = hn::LoadU(f32, s.d_left + q), d_k = hn::Mul(factor, hn::LoadU(f32, s.d_left + k));
      hn::StoreU(hn::MulAdd(hn::Mul(hn::Set(f32, scale), factor), d_q, hn::LoadU(f32, s.d_q + n)), f32, s.d_q + n);
      hn::StoreU(hn::Sub(hn::LoadU(f32, s.d_k + n), d_k), f32, s.d_k + n);
      const auto sum = hn::MulAdd(hn::LoadU(f32, left + q), d_q, hn::LoadU(f32, s.d_g + n));
      hn::StoreU(hn::MulAdd(hn::LoadU(f32, left + k), hn::LoadU(f32, s.d_left + k), sum), f32, s.d_g + n);
    }
  }
}

/// Adds what they give to the keys they look back on: right = k column.
HWY_INLINE void gather_right(const ChunkScratch& s, int64_t block) {
  const hn::ScalableTag<float> f32;
  const float* column = s.column(block);
  const float* right = s.right(block);
  for (int64_t n = 0; n < (block + 1) * kBlockRows * s.K; n += hn::Lanes(f32)) {
    const auto d_right = hn::LoadU(f32, s.d_right + n);
    hn::StoreU(hn::MulAdd(hn::LoadU(f32, column + n), d_right, hn::LoadU(f32, s.d_k + n)), f32, s.d_k + n);
    hn::StoreU(hn::NegMulAdd(hn::LoadU(f32, right + n), d_right, hn::LoadU(f32, s.d_g + n)), f32, s.d_g + n);
  }
}

/// The same for the square of a block that was summed pair by pair.
HWY_INLINE void gather_pairs(const ChunkScratch& s, int64_t block, float scale) {
  const hn::ScalableTag<float> f32;
  const int64_t K = s.K;
  for_each_pair(s, block, [&](int64_t i, int64_t j) HWY_ATTR {
    const float* d_score = s.d_score(block) + (i % kBlockRows) * s.score_stride + j;
    const auto d_read = hn::Set(f32, scale * d_score[0]);
    const auto d_write = hn::Set(f32, -d_score[kBlockRows * s.score_stride]);
    for (int64_t d = 0; d < K; d += hn::Lanes(f32)) {
      const int64_t ni = i * K + d, nj = j * K + d;
      const auto decay = hn::LoadU(f32, s.pair_decay + d);
      const auto k = hn::Mul(hn::LoadU(f32, s.k + nj), decay);
      const auto reader = hn::MulAdd(d_read, hn::LoadU(f32, s.q + ni), hn::Mul(d_write, hn::LoadU(f32, s.k + ni)));
      const auto d_decay = hn::Mul(reader, k);
      hn::StoreU(hn::MulAdd(d_read, k, hn::LoadU(f32, s.d_q + ni)), f32, s.d_q + ni);
      hn::StoreU(hn::MulAdd(d_write, k, hn::LoadU(f32, s.d_k + ni)), f32, s.d_k + ni);
      hn::StoreU(hn::MulAdd(reader, decay, hn::LoadU(f32, s.d_k + nj)), f32, s.d_k + nj);
      hn::StoreU(hn::Add(d_decay, hn::LoadU(f32, s.d_g + ni)), f32, s.d_g + ni);
      hn::StoreU(hn::Sub(hn::LoadU(f32, s.d_g + nj), d_decay), f32, s.d_g + nj);
    }
  });
}

/// From the gradients of the sums to that of decay_log. Row i's decay stands in G of rows i and later, and in
/// (G at the end - G_j) of the rows before it: both sums hold only terms that row i really scales, so that nothing
/// large cancels.
HWY_INLINE void sum_decay_gradients(const ChunkScratch& s, int64_t rows) {
  const hn::ScalableTag<float> f32;
  for (int64_t d = 0; d < s.K; d += hn::Lanes(f32)) {
    auto before = hn::LoadU(f32, s.end_sum + d);
    for (int64_t n = d; n < rows * s.K; n += s.K) {
      const auto own = hn::LoadU(f32, s.d_at_end + n);
      hn::StoreU(before, f32, s.d_at_end + n);
      before = hn::Add(before, own);
    }
    auto after = hn::Zero(f32);
    for (int64_t n = (rows - 1) * s.K + d; n >= 0; n -= s.K) {
      after = hn::Add(after, hn::LoadU(f32, s.d_g + n));
      hn::StoreU(hn::Add(after, hn::LoadU(f32, s.d_at_end + n)), f32, s.d_g + n);
    }
  }
}

/// All gradients of a chunk's inputs but d_v, from what value_gradients made and d_state at the chunk's end.
template <typename Between>
HWY_INLINE void input_gradients(const ChunkScratch& s, int64_t blocks, float scale, const Between& between) {
  const int64_t rows = blocks * kBlockRows;
  scale_corrections(s, rows);
  score_gradients(s, blocks);
  state_gradients(s, blocks, between);
  gather_state_side(s, blocks, scale);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t columns = (block + 1) * kBlockRows;
    gemm<false>(2 * kBlockRows, s.K, columns, rows_of(s.d_score(block), s.score_stride), s.right(block), s.K, s.d_left,
                s.K, between);
    gemm<false>(columns, s.K, 2 * kBlockRows, transposed(s.d_score(block), s.score_stride), s.left(block), s.K,
                s.d_right, s.K, between);
    gather_left(s, block, scale);
    gather_right(s, block);
    if (s.pairwise[block]) gather_pairs(s, block, scale);
  }
  sum_decay_gradients(s, rows);
}

constexpr int64_t kBytesAhead = 24 * 64;  // before each tile of a product; a chunk has some 170 tiles at K = V = 128

/// Where a chunk of a task lies.
struct ChunkPlace {
  int64_t index, first, rows, blocks;
};

template <typename T>
HWY_INLINE ChunkPlace chunk_place(const kda::ChunkInputs<T>& in, const kda::ChunkTask& task, int64_t index) {
  const int64_t first = in.offsets[task.sequence] + index * kda::kChunkRows;
  const int64_t rows = std::min(kda::kChunkRows, in.offsets[task.sequence + 1] - first);
  return {index, first, rows, row_blocks(rows)};
}

template <typename T>
HWY_INLINE int64_t num_chunks(const kda::ChunkInputs<T>& in, const kda::ChunkTask& task) {
  return kda::round_up(in.offsets[task.sequence + 1] - in.offsets[task.sequence], kda::kChunkRows) / kda::kChunkRows;
}

/// What load_chunk reads, but for beta.
template <typename T>
HWY_INLINE void prefetch_inputs(const kda::ChunkInputs<T>& in, const kda::ChunkGradients<T>& grad,
                                const kda::ChunkTask& task, const ChunkPlace& at, RowPrefetch& ahead) {
  ahead.add_keys(in, task.head, at.first, at.rows);
  ahead.add(grad.d_out.at(at.first, task.head), grad.d_out.token_stride, at.rows, in.size.value_size);
}

/// What finish_chunk reads and writes: gradients that go past the caches need no prefetch.
template <typename T>
HWY_INLINE void prefetch_kept(const kda::ChunkInputs<T>& in, const kda::ChunkGradients<T>& grad,
                              const kda::ChunkTask& task, const ChunkPlace& at, RowPrefetch& ahead) {
  const int64_t K = in.size.key_size, V = in.size.value_size, h = task.head;
  ahead.add(grad.kept_of(in, task, at.index), V, kda::kept_rows(K), V);
  if (grad.past_caches) return;
  ahead.add(grad.d_q.at(at.first, h), grad.d_q.token_stride, at.rows, K);
  ahead.add(grad.d_k.at(at.first, h), grad.d_k.token_stride, at.rows, K);
  ahead.add(grad.d_v.at(at.first, h), grad.d_v.token_stride, at.rows, V);
  ahead.add(grad.d_decay_log.at(at.first, h), grad.d_decay_log.token_stride, at.rows, K);
}

template <bool kShared = false, typename T>
HWY_INLINE void load_chunk(const kda::ChunkInputs<T>& in, const kda::ChunkGradients<T>& grad,
                           const kda::ChunkTask& task, const ChunkPlace& at, const ChunkScratch& s) {
  load_keys<kShared>(in, task.head, at.first, at.rows, s);
  load_rows(grad.d_out.at(at.first, task.head), grad.d_out.token_stride, at.rows, in.size.value_size, s.residual,
            at.blocks * kBlockRows, s.V);
}

template <typename T>
HWY_INLINE void store_gradient(const float* from, int64_t padded_columns, const ChunkPlace& at, int64_t columns, T* to,
                               int64_t stride, bool past_caches) {
  if constexpr (std::is_same_v<T, float>) {
    if (past_caches) return stream_rows(from, padded_columns, at.rows, columns, to, stride);
  }
  store_rows(from, padded_columns, at.rows, columns, to, stride);
}

/// All gradients of a chunk's inputs, once d_v and what belongs to it are there.
template <typename T>
HWY_INLINE void finish_chunk(const kda::ChunkInputs<T>& in, const kda::ChunkGradients<T>& grad,
                             const kda::ChunkTask& task, const ChunkPlace& at, ChunkScratch s, RowPrefetch& ahead) {
  const int64_t K = in.size.key_size, V = in.size.value_size, h = task.head;
  const float* kept = grad.kept_of(in, task, at.index);
  if (K == s.K && V == s.V) {
    s.entering = kept;
  } else {
    load_rows(kept, V, K, V, s.state, s.K, s.V);
    s.entering = s.state;
  }
  load_rows(kept + K * V, V, at.rows, V, s.correction, at.blocks * kBlockRows, s.V);
  input_gradients(s, at.blocks, static_cast<float>(in.size.scale), [&] { ahead.some(kBytesAhead); });
  const auto store = [&](const float* from, int64_t padded_columns, int64_t columns, const auto& to) HWY_ATTR {
    store_gradient(from, padded_columns, at, columns, to.at(at.first, h), to.token_stride, grad.past_caches);
  };
  store(s.d_q, s.K, K, grad.d_q);
  store(s.d_k, s.K, K, grad.d_k);
  store(s.d_v, s.V, V, grad.d_v);
  store(s.d_g, s.K, K, grad.d_decay_log);
  for (int64_t i = 0; i < at.rows; ++i) *grad.d_beta.at(at.first + i, h) = s.d_beta[i];
}

/// d_state [K, V] at the end of the task's sequence, and from it at the start.
template <typename T>
HWY_INLINE void load_final(const kda::ChunkInputs<T>& in, const kda::ChunkGradients<T>& grad,
                           const kda::ChunkTask& task, const ChunkScratch& s, float* d_state) {
  const int64_t K = in.size.key_size, V = in.size.value_size, square = task.sequence * in.size.heads + task.head;
  if (grad.d_final_state != nullptr) {
    load_rows(grad.d_final_state + square * K * V, V, K, V, d_state, s.K, s.V);
  } else {
    std::fill(d_state, d_state + s.K * s.V, 0.0f);
  }
}

template <typename T>
HWY_INLINE void store_initial(const kda::ChunkInputs<T>& in, const kda::ChunkGradients<T>& grad,
                              const kda::ChunkTask& task, const ChunkScratch& s, const float* d_state) {
  const int64_t K = in.size.key_size, V = in.size.value_size, square = task.sequence * in.size.heads + task.head;
  if (grad.d_initial_state != nullptr) store_rows(d_state, s.V, K, V, grad.d_initial_state + square * K * V, V);
}

template <typename T>
HWY_INLINE void retreat_alone(const kda::ChunkInputs<T>& in, const kda::ChunkGradients<T>& grad,
                              const kda::ChunkTask& task, const ChunkScratch& scratch) {
  for (int64_t i = 0; i < task.heads; ++i) {
    load_final(in, grad, task.of_head(i), scratch, scratch.of_head(i).d_state);
  }
  for (int64_t chunk = num_chunks(in, task) - 1; chunk >= 0; --chunk) {
    const ChunkPlace at = chunk_place(in, task, chunk);
    for (int64_t i = 0; i < task.heads; ++i) {
      RowPrefetch ahead;
      const bool last = i + 1 == task.heads;
      if (!last || chunk > 0) {
        const kda::ChunkTask next_task = task.of_head(last ? 0 : i + 1);
        const ChunkPlace next = last ? chunk_place(in, task, chunk - 1) : at;
        prefetch_inputs(in, grad, next_task, next, ahead);
        prefetch_kept(in, grad, next_task, next, ahead);
      }
      const auto between = [&] { ahead.some(kBytesAhead); };
      const ChunkScratch s = scratch.of_head(i);
      load_chunk(in, grad, task.of_head(i), at, s);
      value_gradients(s, at.blocks, s.V, between);
      finish_chunk(in, grad, task.of_head(i), at, s, ahead);
      move_gradient(s, at.blocks, s.V, s.d_state, between);
    }
  }
  for (int64_t i = 0; i < task.heads; ++i) {
    store_initial(in, grad, task.of_head(i), scratch, scratch.of_head(i).d_state);
  }
}

/// The same by a team. Chunks are counted from the last one.
template <typename T>
HWY_INLINE void retreat_together(const kda::ChunkInputs<T>& in, const kda::ChunkGradients<T>& grad,
                                 const kda::ChunkTask& task, const ChunkScratch& scratch, kda::ChunkTeam& team,
                                 int64_t member) {
  const int64_t chunks = num_chunks(in, task), members = team.members();
  const int64_t strip = kda::round_up(task.num_values, kBlockRows);
  RowPrefetch inputs, kept;
  const auto place_of = [&](int64_t chunk) { return chunk_place(in, task, chunks - 1 - chunk); };
  const auto make = [&](int64_t chunk) HWY_ATTR {
    load_chunk<true>(in, grad, task, place_of(chunk), team.unshared(scratch, chunk));
    share_keys(team, scratch, chunk);
    team.set_made(member);
  };
  const auto finish = [&](int64_t chunk) HWY_ATTR {
    team.wait_walked(chunk);
    finish_chunk(in, grad, task, place_of(chunk), team.at(scratch, chunk), inputs);
  };
  if (member == 0) load_final(in, grad, task, scratch, team.d_state(0));
  for (int64_t chunk = member; chunk < std::min(2 * members, chunks); chunk += members) make(chunk);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const ChunkScratch s = team.at(scratch, chunk).from_value(task.first_value);
    const int64_t blocks = place_of(chunk).blocks;
    RowPrefetch next;
    if (chunk + 1 < chunks) prefetch_shared(team, scratch, chunk + 1, next);
    const auto between = [&] {
      next.some(kBytesAhead);
      kept.some(kBytesAhead);
    };
    team.wait_made(chunk);
    value_gradients(s, blocks, strip, between);
    move_gradient(s, blocks, strip, team.d_state(chunk + 1) + task.first_value, between);
    team.set_walked(member);
    if (chunk % members != member) continue;
    kept = inputs = {};
    prefetch_kept(in, grad, task, place_of(chunk), kept);
    if (chunk + 2 * members < chunks) prefetch_inputs(in, grad, task, place_of(chunk + 2 * members), inputs);
    if (chunk >= members) finish(chunk - members);
    if (chunk + 2 * members < chunks) make(chunk + 2 * members);  // in the slot of the one just finished
  }
  for (int64_t chunk = std::max<int64_t>(chunks - members, 0); chunk < chunks; ++chunk) {
    if (chunk % members == member) finish(chunk);
  }
  if (member == 0) {
    team.wait_walked(chunks - 1);
    store_initial(in, grad, task, scratch, team.d_state(chunks));
  }
}

template <typename T>
void run_task(const kda::ChunkInputs<T>& in, const kda::ChunkGradients<T>& grad, const kda::ChunkTask& task,
              const ChunkScratch& s, kda::ChunkTeam* team, int64_t member) {
  if (team == nullptr) {
    retreat_alone(in, grad, task, s);
  } else {
    retreat_together(in, grad, task, s, *team, member);
  }
  hwy::FlushStream();
}

void backward_f32(const kda::ChunkInputs<float>& in, const kda::ChunkGradients<float>& grad, const kda::ChunkTask& task,
                  const ChunkScratch& scratch, kda::ChunkTeam* team, int64_t member) {
  run_task(in, grad, task, scratch, team, member);
}

void backward_bf16(const kda::ChunkInputs<c10::BFloat16>& in, const kda::ChunkGradients<c10::BFloat16>& grad,
                   const kda::ChunkTask& task, const ChunkScratch& scratch, kda::ChunkTeam* team, int64_t member) {
  run_task(in, grad, task, scratch, team, member);
}

}  // namespace furlong::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furlong {

HWY_EXPORT(backward_f32);
HWY_EXPORT(backward_bf16);

namespace kda {

void chunk_backward(const ChunkInputs<float>& in, const ChunkGradients<float>& grad, const ChunkTask& task,
                    const ChunkScratch& scratch, ChunkTeam* team, int64_t member) {
  HWY_DYNAMIC_DISPATCH(backward_f32)(in, grad, task, scratch, team, member);
}

void chunk_backward(const ChunkInputs<c10::BFloat16>& in, const ChunkGradients<c10::BFloat16>& grad,
                    const ChunkTask& task, const ChunkScratch& scratch, ChunkTeam* team, int64_t member) {
  HWY_DYNAMIC_DISPATCH(backward_bf16)(in, grad, task, scratch, team, member);
}

}  // namespace kda
}  // namespace furlong
#endif  // HWY_ONCE
