// mla_absorbed on the CPU.
//   N packed query tokens   B sequences   H heads   E = L + R entry width   L latent size   C cache capacity
//
// A row is one head of one query token. A task is one sequence, one group of its rows and one span of kSpanEntries
// entries; it leaves the span's softmax numerators over latents, denominators and maxima. A second pass merges the
// spans of a row in order. Spans and groups have fixed sizes, so the result does not depend on the number of threads.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "furlong/base/parallel.h"
#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/mla/mla_op.h"
#include "furlong/ops/mla/spans.h"

namespace furlong::mla_detail {

namespace {

/// One group of a 1M-token context then leaves 256 partial results, 8 MB at L = 512.
constexpr int64_t kSpanEntries = 4096;
constexpr int64_t kRowGrain = 8;

struct Task {
  int64_t sequence, first_row, first_entry, num_entries;
};

struct Problem {
  const int64_t* offsets;
  const int64_t* slots;
  const int64_t* past;
  int64_t sequences, heads, entry_size, latent_size, capacity;

  int64_t rows(int64_t b) const { return (offsets[b + 1] - offsets[b]) * heads; }
  int64_t groups(int64_t b) const { return (rows(b) + kGroupRows - 1) / kGroupRows; }
  int64_t entries(int64_t b) const { return past[b] + offsets[b + 1] - offsets[b]; }
  int64_t spans(int64_t b) const { return (entries(b) + kSpanEntries - 1) / kSpanEntries; }
};

void check_ranges(const Problem& problem, int64_t query_rows, int64_t num_slots) {
  for (int64_t b = 0; b < problem.sequences; ++b) {
    check_argument(problem.offsets[b] <= problem.offsets[b + 1] && problem.offsets[b + 1] <= query_rows, "mla_absorbed",
                   "offsets: sequence " + std::to_string(b) + " lies outside q_NHE");
    check_argument(problem.slots[b] >= 0 && problem.slots[b] < num_slots, "mla_absorbed",
                   "slots_B: got " + std::to_string(problem.slots[b]) + " of " + std::to_string(num_slots));
    check_argument(problem.past[b] >= 0 && problem.entries(b) <= problem.capacity, "mla_absorbed",
                   "past_B: sequence " + std::to_string(b) + " needs " + std::to_string(problem.entries(b)) +
                       " cache entries of " + std::to_string(problem.capacity));
  }
}

/// Tasks in the order sequence, group, span: the spans of a group stand side by side.
std::vector<Task> list_tasks(const Problem& problem) {
  std::vector<Task> tasks;
  for (int64_t b = 0; b < problem.sequences; ++b) {
    for (int64_t group = 0; group < problem.groups(b); ++group) {
      for (int64_t first = 0; first < problem.entries(b); first += kSpanEntries) {
        tasks.push_back({b, group * kGroupRows, first, std::min(kSpanEntries, problem.entries(b) - first)});
      }
    }
  }
  return tasks;
}

/// Results of all tasks, one group of rows each.
struct Partials {
  std::vector<float> numerator, denominator, maximum;
  int64_t latent_size;

  Partials(size_t tasks, int64_t latent)
      : numerator(tasks * kGroupRows * latent),
        denominator(tasks * kGroupRows),
        maximum(tasks * kGroupRows),
        latent_size(latent) {}
  SpanResult of(int64_t task) {
    return {&numerator[task * kGroupRows * latent_size], &denominator[task * kGroupRows], &maximum[task * kGroupRows]};
  }
};

template <typename Query, typename Entry>
void run_task(const Problem& problem, const Task& task, const Query* q, const Entry* cache, float scale,
              const SpanResult& result) {
  const int64_t width = problem.entry_size;
  const int64_t rows = std::min(kGroupRows, problem.rows(task.sequence) - task.first_row);
  std::vector<float> scaled(kGroupRows * width, 0.0f);
  const Query* q_rows = q + (problem.offsets[task.sequence] * problem.heads + task.first_row) * width;
  for (int64_t i = 0; i < rows * width; ++i) scaled[i] = static_cast<float>(q_rows[i]) * scale;
  int64_t visible_end[kGroupRows];
  for (int64_t r = 0; r < rows; ++r) {
    visible_end[r] = problem.past[task.sequence] + (task.first_row + r) / problem.heads + 1 - task.first_entry;
  }
  const Entry* entries = cache + (problem.slots[task.sequence] * problem.capacity + task.first_entry) * width;
  absorb_span({scaled.data(), rows, visible_end, task.num_entries, width, problem.latent_size}, entries, result);
}

/// out = sum over spans of the numerators / the same of the denominators, both relative to the greatest maximum.
template <typename Query>
void merge_row(Partials& partials, int64_t first_task, int64_t spans, int64_t row, int64_t latent, Query* out) {
  float maximum = -INFINITY;
  for (int64_t s = 0; s < spans; ++s) maximum = std::max(maximum, partials.of(first_task + s).maximum[row]);
  std::vector<float> sum(latent, 0.0f);
  float denominator = 0.0f;
  for (int64_t s = 0; s < spans; ++s) {
    const SpanResult part = partials.of(first_task + s);
    const float factor = std::exp(part.maximum[row] - maximum);
    denominator += factor * part.denominator[row];
    for (int64_t l = 0; l < latent; ++l) sum[l] += factor * part.numerator[row * latent + l];
  }
  for (int64_t l = 0; l < latent; ++l) out[l] = static_cast<Query>(sum[l] / denominator);
}

template <typename Query, typename Entry>
void absorbed(const Problem& problem, const at::Tensor& q_NHE, const at::Tensor& cache_SCE, float scale,
              at::Tensor& u_NHL) {
  const std::vector<Task> tasks = list_tasks(problem);
  Partials partials(tasks.size(), problem.latent_size);
  parallel_for(0, static_cast<int64_t>(tasks.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      run_task(problem, tasks[task], q_NHE.const_data_ptr<Query>(), cache_SCE.const_data_ptr<Entry>(), scale,
               partials.of(task));
    }
  });
  int64_t first_task = 0;
  for (int64_t b = 0; b < problem.sequences; ++b) {
    const int64_t spans = problem.spans(b);
    Query* out = u_NHL.data_ptr<Query>() + problem.offsets[b] * problem.heads * problem.latent_size;
    parallel_for(0, problem.rows(b), kRowGrain, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        merge_row(partials, first_task + row / kGroupRows * spans, spans, row % kGroupRows, problem.latent_size,
                  out + row * problem.latent_size);
      }
    });
    first_task += problem.groups(b) * spans;
  }
}

at::Tensor reference(const at::Tensor& q_NHE, const at::Tensor& cache_SCE, const at::Tensor& offsets,
                     const at::Tensor& slots_B, const at::Tensor& past_B, int64_t latent_size, double scale) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, int64_t, double);
  static const auto op = find_op<Signature>("furlong::mla_absorbed_reference");
  return op.call(q_NHE, cache_SCE, offsets, slots_B, past_B, latent_size, scale);
}

at::Tensor absorbed_cpu(const at::Tensor& q_in, const at::Tensor& cache_in, const at::Tensor& offsets,
                        const at::Tensor& slots_B, const at::Tensor& past_B, int64_t latent_size, double scale) {
  if (!has_cpu_kernel(q_in) || !has_cpu_kernel(cache_in)) {
    return reference(q_in, cache_in, offsets, slots_B, past_B, latent_size, scale);
  }
  check_absorbed(q_in, cache_in, offsets, slots_B, past_B, latent_size);
  const at::Tensor q_NHE = q_in.contiguous(), cache_SCE = cache_in.contiguous();
  const Problem problem{offsets.const_data_ptr<int64_t>(),
                        slots_B.const_data_ptr<int64_t>(),
                        past_B.const_data_ptr<int64_t>(),
                        slots_B.size(0),
                        q_NHE.size(1),
                        q_NHE.size(2),
                        latent_size,
                        cache_SCE.size(1)};
  check_ranges(problem, q_NHE.size(0), cache_SCE.size(0));
  at::Tensor u_NHL = at::zeros({q_NHE.size(0), q_NHE.size(1), latent_size}, q_NHE.options());
  const bool bf16_q = q_NHE.scalar_type() == at::kBFloat16, bf16_cache = cache_SCE.scalar_type() == at::kBFloat16;
  const auto kernel = bf16_q ? (bf16_cache ? absorbed<at::BFloat16, at::BFloat16> : absorbed<at::BFloat16, float>)
                             : (bf16_cache ? absorbed<float, at::BFloat16> : absorbed<float, float>);
  kernel(problem, q_NHE, cache_SCE, static_cast<float>(scale), u_NHL);
  return u_NHL;
}

}  // namespace

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("mla_absorbed", absorbed_cpu);
}

}  // namespace furlong::mla_detail
