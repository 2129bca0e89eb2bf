// kda_chunk on the CPU, forward: chunk by chunk along each sequence, one (sequence, head, strip of value columns) a
// task. Shapes and names as in cpu/chunk-inl.h.
//
//   u       = v - (k exp(G)) S - a written      written = diag(beta) u
//   out     = (scale q exp(G)) S + P written
//   S       = diag(exp(G_end)) S + (k exp(G_end - G))^T written

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/kda/cpu/forward.cpp"
#include "hwy/foreach_target.h"
// clang-format: the line above must come first.
#include "furlong/ops/kda/cpu/chunk-inl.h"
#include "furlong/ops/kda/cpu/kernels.h"
#include "furlong/ops/kda/cpu/recurrent-inl.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace furlong::HWY_NAMESPACE {

constexpr int64_t kBytesAhead = 16 * 64;  // before each tile of a product; a chunk has some 110 tiles at K = V = 128

/// out rows of the loaded chunk, its corrections, and the state moved to the chunk's end.
template <typename Between>
HWY_INLINE void advance_chunk(const ChunkScratch& s, int64_t blocks, const Between& between) {
  const hn::ScalableTag<float> f32;
  const int64_t rows = blocks * kBlockRows, V = s.V;
  gemm<false>(2 * rows, V, s.K, rows_of(s.from_start, s.K), s.state, V, s.product, V, between);
  for (int64_t n = 0; n < rows * V; n += hn::Lanes(f32)) {
    const auto recalled = hn::LoadU(f32, s.product + rows * V + n);
    hn::StoreU(hn::Sub(hn::LoadU(f32, s.v + n), recalled), f32, s.correction + n);
  }
  solve(s, blocks);
  for (int64_t block = 0; block < blocks; ++block) {
    gemm<true>(kBlockRows, V, (block + 1) * kBlockRows, rows_of(s.scores(block), s.score_stride), s.written, V,
               s.product + block * kBlockRows * V, V, between);
  }
  gemm_onto<Onto::kScaledRows>(s.K, V, rows, transposed(s.at_end, s.K), s.written, V, Base{s.state, V, s.whole},
                               s.state, V, between);
}

/// One chunk whose keys are loaded, from its values to its output.
template <typename T, typename Between>
HWY_INLINE void walk_chunk(const kda::ChunkInputs<T>& in, const kda::ChunkOutputs<T>& out, const kda::ChunkTask& task,
                           int64_t first, int64_t rows, const ChunkScratch& s, const Between& between) {
  const int64_t K = in.size.key_size, V = in.size.value_size, h = task.head, blocks = row_blocks(rows);
  const int64_t chunk = in.first_chunks[task.sequence] + (first - in.offsets[task.sequence]) / kda::kChunkRows;
  float* kept =
      out.kept == nullptr ? nullptr : out.kept + (chunk * in.size.heads + h) * kda::kept_rows(K) * V + task.first_value;
  if (kept != nullptr) stream_rows(s.state, s.V, K, task.num_values, kept, V);
  load_rows(in.v.at(first, h) + task.first_value, in.v.token_stride, rows, task.num_values, s.v, blocks * kBlockRows,
            s.V);
  if (rows <= kRecurrentRows) {
    recur(in, h, first, rows, s);
  } else {
    advance_chunk(s, blocks, between);
  }
  store_rows(s.product, s.V, rows, task.num_values, out.out.at(first, h) + task.first_value, out.out.token_stride);
  if (kept != nullptr) stream_rows(s.correction, s.V, rows, task.num_values, kept + K * V, V);
}

template <typename T>
HWY_INLINE void prefetch_values(const kda::ChunkInputs<T>& in, const kda::ChunkOutputs<T>& out,
                                const kda::ChunkTask& task, int64_t first, int64_t rows, RowPrefetch& ahead) {
  ahead.add(in.v.at(first, task.head) + task.first_value, in.v.token_stride, rows, task.num_values);
  ahead.add(out.out.at(first, task.head) + task.first_value, out.out.token_stride, rows, task.num_values);
}

template <typename T>
HWY_INLINE void walk_alone(const kda::ChunkInputs<T>& in, const kda::ChunkOutputs<T>& out, const kda::ChunkTask& task,
                           const ChunkScratch& s) {
  const int64_t end = in.offsets[task.sequence + 1];
  const auto rows_at = [&](int64_t first) { return std::min(kda::kChunkRows, end - first); };
  for (int64_t first = in.offsets[task.sequence]; first < end; first += kda::kChunkRows) {
    const int64_t rows = rows_at(first);
    for (int64_t i = 0; i < task.heads; ++i) {
      const kda::ChunkTask own = task.of_head(i);
      RowPrefetch ahead;
      const bool last = i + 1 == task.heads;
      const int64_t next = last ? first + rows : first;
      if (next < end) {
        const kda::ChunkTask next_task = task.of_head(last ? 0 : i + 1);
        ahead.add_keys(in, next_task.head, next, rows_at(next));
        prefetch_values(in, out, next_task, next, rows_at(next), ahead);
      }
      const ChunkScratch of_head = s.of_head(i);
      if (rows > kRecurrentRows) load_keys(in, own.head, first, rows, of_head);
      walk_chunk(in, out, own, first, rows, of_head, [&] { ahead.some(kBytesAhead); });
    }
  }
}

/// The same on a strip of columns, the keys being made by the members in turn.
template <typename T>
HWY_INLINE void walk_together(const kda::ChunkInputs<T>& in, const kda::ChunkOutputs<T>& out,
                              const kda::ChunkTask& task, const ChunkScratch& s, kda::ChunkTeam& team, int64_t member) {
  const int64_t begin = in.offsets[task.sequence], end = in.offsets[task.sequence + 1], members = team.members();
  const auto first_of = [&](int64_t chunk) { return begin + chunk * kda::kChunkRows; };
  const auto rows_of_chunk = [&](int64_t chunk) { return std::min(kda::kChunkRows, end - first_of(chunk)); };
  const auto make = [&](int64_t chunk) HWY_ATTR {
    if (rows_of_chunk(chunk) > kRecurrentRows) {
      load_keys<true>(in, task.head, first_of(chunk), rows_of_chunk(chunk), team.unshared(s, chunk));
      share_keys(team, s, chunk);
    }
    team.set_made(member);
  };
  for (int64_t chunk = member; chunk < 2 * members && first_of(chunk) < end; chunk += members) make(chunk);
  RowPrefetch keys;
  for (int64_t chunk = 0; first_of(chunk) < end; ++chunk) {
    RowPrefetch next;
    if (first_of(chunk + 1) < end) {
      prefetch_values(in, out, task, first_of(chunk + 1), rows_of_chunk(chunk + 1), next);
      prefetch_shared(team, s, chunk + 1, next);
    }
    const int64_t rows = rows_of_chunk(chunk);
    team.wait_made(chunk);
    walk_chunk(in, out, task, first_of(chunk), rows, rows > kRecurrentRows ? team.at(s, chunk) : s, [&] {
      next.some(2 * kBytesAhead);
      keys.some(kBytesAhead);
    });
    team.set_walked(member);
    if (chunk % members != member) continue;
    if (const int64_t own = chunk + 2 * members; first_of(own) < end) {
      if (chunk >= members) team.wait_walked(chunk - members);  // it leaves its slot
      make(own);
    }
    keys = {};
    if (const int64_t own = chunk + 3 * members; first_of(own) < end) {
      keys.add_keys(in, task.head, first_of(own), rows_of_chunk(own));
    }
  }
}

template <typename T>
void run_task(const kda::ChunkInputs<T>& in, const kda::ChunkOutputs<T>& out, const kda::ChunkTask& task,
              const ChunkScratch& s, kda::ChunkTeam* team, int64_t member) {
  const int64_t K = in.size.key_size, V = in.size.value_size;
  const int64_t square = (task.sequence * in.size.heads + task.head) * K * V + task.first_value;
  for (int64_t i = 0; i < task.heads; ++i) {
    float* state = s.of_head(i).state;
    if (in.initial_state != nullptr) {
      load_rows(in.initial_state + square + i * K * V, V, K, task.num_values, state, s.K, s.V);
    } else {
      std::fill(state, state + s.K * s.V, 0.0f);
    }
  }
  if (team == nullptr) {
    walk_alone(in, out, task, s);
  } else {
    walk_together(in, out, task, s, *team, member);
  }
  for (int64_t i = 0; i < task.heads; ++i) {
    store_rows(s.of_head(i).state, s.V, K, task.num_values, out.final_state + square + i * K * V, V);
  }
  hwy::FlushStream();
}

void forward_f32(const kda::ChunkInputs<float>& in, const kda::ChunkOutputs<float>& out, const kda::ChunkTask& task,
                 const ChunkScratch& scratch, kda::ChunkTeam* team, int64_t member) {
  run_task(in, out, task, scratch, team, member);
}

void forward_bf16(const kda::ChunkInputs<c10::BFloat16>& in, const kda::ChunkOutputs<c10::BFloat16>& out,
                  const kda::ChunkTask& task, const ChunkScratch& scratch, kda::ChunkTeam* team, int64_t member) {
  run_task(in, out, task, scratch, team, member);
}

}  // namespace furlong::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furlong {

HWY_EXPORT(forward_f32);
HWY_EXPORT(forward_bf16);

namespace kda {

void chunk_forward(const ChunkInputs<float>& in, const ChunkOutputs<float>& out, const ChunkTask& task,
                   const ChunkScratch& scratch, ChunkTeam* team, int64_t member) {
  HWY_DYNAMIC_DISPATCH(forward_f32)(in, out, task, scratch, team, member);
}

void chunk_forward(const ChunkInputs<c10::BFloat16>& in, const ChunkOutputs<c10::BFloat16>& out, const ChunkTask& task,
                   const ChunkScratch& scratch, ChunkTeam* team, int64_t member) {
  HWY_DYNAMIC_DISPATCH(forward_bf16)(in, out, task, scratch, team, member);
}

}  // namespace kda
}  // namespace furlong
#endif  // HWY_ONCE
