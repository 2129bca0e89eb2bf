// kda_chunk on the CPU, forward: chunk by chunk along each sequence, one (sequence, head, strip of value columns) a
// task. Shapes and names as in cpu_chunk-inl.h.
//
//   written = (I + A)^-1 beta (v - (k exp(G)) S)
//   out     = (scale q exp(G)) S + P written
//   S       = diag(exp(G_end)) S + (k exp(G_end - G))^T written

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/kda/cpu_forward.cpp"
#include "hwy/foreach_target.h"
// clang-format: the line above must come first.
#include "furlong/ops/kda/cpu_chunk-inl.h"
#include "furlong/ops/kda/cpu_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace furlong::HWY_NAMESPACE {

/// out rows of the loaded chunk, and the state moved to the chunk's end.
HWY_INLINE void advance_chunk(const ChunkScratch& s, int64_t blocks) {
  const int64_t rows = blocks * kBlockRows;
  gemm<false>(2 * rows, s.V, s.K, rows_of(s.from_start, s.K), s.state, s.V, s.product, s.V);
  pseudo_values(s, blocks, s.product + rows * s.V);
  for (int64_t block = 0; block < blocks; ++block) {
    gemm<true>(kBlockRows, s.V, (block + 1) * kBlockRows, rows_of(s.scores(block), s.score_stride), s.written, s.V,
               s.product + block * kBlockRows * s.V, s.V);
  }
  forget(s, s.state);
  gemm<true>(s.K, s.V, rows, transposed(s.at_end, s.K), s.written, s.V, s.state, s.V);
}

template <typename T>
void run_task(const kda::ChunkInputs<T>& in, const kda::ChunkOutputs<T>& out, const kda::ChunkTask& task,
              const ChunkScratch& s) {
  const kda::ChunkSizes& size = in.size;
  const int64_t K = size.key_size, V = size.value_size;
  const int64_t square = (task.sequence * size.heads + task.head) * K * V + task.first_value;
  if (in.initial_state != nullptr) {
    load_rows(in.initial_state + square, V, K, task.num_values, s.state, s.K, s.V);
  } else {
    std::fill(s.state, s.state + s.K * s.V, 0.0f);
  }
  const int64_t end = in.offsets[task.sequence + 1];
  int64_t chunk = in.first_chunks[task.sequence];
  for (int64_t first = in.offsets[task.sequence]; first < end; first += kda::kChunkRows, ++chunk) {
    const int64_t rows = std::min(kda::kChunkRows, end - first);
    if (out.entering_states != nullptr) {
      float* entering = out.entering_states + (chunk * size.heads + task.head) * K * V + task.first_value;
      store_rows(s.state, s.V, K, task.num_values, entering, V);
    }
    load_chunk(in, task, first, rows, s);
    advance_chunk(s, kda::round_up(rows, kBlockRows) / kBlockRows);
    store_rows(s.product, s.V, rows, task.num_values, out.out.at(first, task.head) + task.first_value,
               out.out.token_stride);
  }
  store_rows(s.state, s.V, K, task.num_values, out.final_state + square, V);
}

void forward_f32(const kda::ChunkInputs<float>& in, const kda::ChunkOutputs<float>& out, const kda::ChunkTask& task,
                 const ChunkScratch& scratch) {
  run_task(in, out, task, scratch);
}

void forward_bf16(const kda::ChunkInputs<c10::BFloat16>& in, const kda::ChunkOutputs<c10::BFloat16>& out,
                  const kda::ChunkTask& task, const ChunkScratch& scratch) {
  run_task(in, out, task, scratch);
}

}  // namespace furlong::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furlong {

HWY_EXPORT(forward_f32);
HWY_EXPORT(forward_bf16);

namespace kda {

void chunk_forward(const ChunkInputs<float>& in, const ChunkOutputs<float>& out, const ChunkTask& task,
                   const ChunkScratch& scratch) {
  HWY_DYNAMIC_DISPATCH(forward_f32)(in, out, task, scratch);
}

void chunk_forward(const ChunkInputs<c10::BFloat16>& in, const ChunkOutputs<c10::BFloat16>& out, const ChunkTask& task,
                   const ChunkScratch& scratch) {
  HWY_DYNAMIC_DISPATCH(forward_bf16)(in, out, task, scratch);
}

}  // namespace kda
}  // namespace furlong
#endif  // HWY_ONCE
