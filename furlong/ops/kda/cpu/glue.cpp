// kda_chunk on CPU tensors: from tensors to the pointers of the kernels, and the split over threads.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <memory>

#include "furlong/base/parallel.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/common/recycled.h"
#include "furlong/ops/kda/cpu/kernels.h"
#include "furlong/ops/kda/internal.h"

namespace furlong::kda {

namespace {

template <typename T>
TokenRows<const T> read_rows(const at::Tensor& x) {
  return {x.const_data_ptr<T>(), x.stride(0), x.stride(1)};
}

template <typename T>
TokenRows<T> write_rows(const at::Tensor& x) {
  return {x.mutable_data_ptr<T>(), x.stride(0), x.stride(1)};
}

/// Views of wider rows are read in place as long as a head's columns are adjacent.
at::Tensor with_adjacent_columns(const at::Tensor& x) {
  return x.size(-1) <= 1 || x.stride(-1) == 1 ? x : x.contiguous();
}

std::vector<int64_t> first_chunks(const at::Tensor& offsets_host, int64_t& total) {
  const auto* offsets = offsets_host.const_data_ptr<int64_t>();
  std::vector<int64_t> first;
  total = 0;
  for (int64_t b = 0; b + 1 < offsets_host.numel(); ++b) {
    first.push_back(total);
    total += (offsets[b + 1] - offsets[b] + kChunkRows - 1) / kChunkRows;
  }
  return first;
}

/// The tensors behind a ChunkInputs, kept alive for its pointers.
struct HeldInputs {
  at::Tensor q, k, v, decay_log, beta, offsets, initial_state;
  std::vector<int64_t> chunks;
  int64_t num_chunks = 0;
  double scale;

  HeldInputs(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV, const at::Tensor& decay_log_NHK,
             const at::Tensor& beta_NH, const at::Tensor& offsets_host,
             const std::optional<at::Tensor>& initial_state_BHKV, double scale)
      : q(with_adjacent_columns(q_NHK)),
        k(with_adjacent_columns(k_NHK)),
        v(with_adjacent_columns(v_NHV)),
        decay_log(with_adjacent_columns(decay_log_NHK)),
        beta(beta_NH),
        offsets(offsets_host),
        scale(scale) {
    if (initial_state_BHKV.has_value()) initial_state = initial_state_BHKV->contiguous();
    chunks = first_chunks(offsets, num_chunks);
  }

  template <typename T>
  ChunkInputs<T> pointers() const {
    return {{offsets.numel() - 1, q.size(1), q.size(2), v.size(2), scale},
            offsets.const_data_ptr<int64_t>(),
            chunks.data(),
            read_rows<T>(q),
            read_rows<T>(k),
            read_rows<T>(v),
            read_rows<float>(decay_log),
            read_rows<float>(beta),
            initial_state.defined() ? initial_state.const_data_ptr<float>() : nullptr};
  }
  int64_t tokens() const { return offsets.const_data_ptr<int64_t>()[offsets.numel() - 1]; }
};

enum class Scratch { kForward, kGradient, kStrip };

/// This thread's working memory, kept from call to call: fresh pages would cost a short call more than its work.
const ChunkScratch& thread_scratch(int64_t K, int64_t V, Scratch use) {
  thread_local std::unique_ptr<ChunkMemory> kept[3];
  auto& memory = kept[static_cast<int>(use)];
  K = round_up(K, kBlockRows);
  V = round_up(V, kBlockRows);
  if (memory == nullptr || memory->scratch().K != K || memory->scratch().V != V) {
    memory = std::make_unique<ChunkMemory>(K, V, use == Scratch::kGradient);
  }
  return memory->scratch();
}

/// Runs body(task, scratch) for all tasks of the plan, one worker a thread.
template <typename Body>
void run_tasks(const ChunkSizes& size, const int64_t* offsets, Scratch use, const Body& body) {
  const auto plan = plan_tasks(size, offsets, num_threads());
  parallel_for(0, static_cast<int64_t>(plan.size()), 1, [&](int64_t first, int64_t last) {
    const ChunkScratch& scratch = thread_scratch(size.key_size, size.value_size, use);
    for (int64_t worker = first; worker < last; ++worker) {
      for (const ChunkTask& task : plan[worker]) body(task, scratch);
    }
  });
}

/// With two or more threads for each (sequence, head) a team each, on strips of value columns.
struct TeamPlan {
  int64_t walks = 0, strips = 0, width = 0;  // no teams: no walks
};

/// No teams if there are not enough threads, or no sequence is long enough for it.
TeamPlan plan_teams(const ChunkSizes& size, const int64_t* offsets) {
  constexpr int64_t kLong = 4 * kChunkRows;
  const int64_t walks = size.sequences * size.heads;
  int64_t longest = 0;
  for (int64_t b = 0; b < size.sequences; ++b) longest = std::max(longest, offsets[b + 1] - offsets[b]);
  if (walks == 0 || longest < kLong) return {};
  const int64_t most = std::min<int64_t>(num_threads() / walks, size.value_size / kBlockRows);
  if (most < 2) return {};
  const int64_t width = round_up((size.value_size + most - 1) / most, kBlockRows);
  return {walks, (size.value_size + width - 1) / width, width};
}

/// What the teams that this thread starts share, kept from call to call.
std::vector<std::unique_ptr<ChunkTeam>>& team_memory(const ChunkSizes& size, const TeamPlan& plan, bool gradient) {
  thread_local std::vector<std::unique_ptr<ChunkTeam>> kept[2];
  auto& teams = kept[gradient];
  const int64_t K = round_up(size.key_size, kBlockRows), V = round_up(size.value_size, kBlockRows);
  teams.resize(plan.walks);
  for (auto& team : teams) {
    if (team == nullptr || !team->fits(K, V, plan.strips)) {
      team = std::make_unique<ChunkTeam>(K, V, plan.strips, gradient);
    }
    team->reset();
  }
  return teams;
}

/// Runs body(task, scratch, team, strip) on a thread for each strip. False, with nothing done, without a team.
template <typename Body>
bool run_teams(const ChunkSizes& size, const int64_t* offsets, bool gradient, const Body& body) {
  const TeamPlan plan = plan_teams(size, offsets);
  if (plan.walks == 0) return false;
  const auto& teams = team_memory(size, plan, gradient);
  return run_together(plan.walks * plan.strips, [&](int64_t worker) {
    const int64_t walk = worker / plan.strips, strip = worker % plan.strips, first = strip * plan.width;
    const ChunkTask task{walk / size.heads, walk % size.heads, first, std::min(plan.width, size.value_size - first)};
    const ChunkScratch& scratch = gradient ? thread_scratch(size.key_size, size.value_size, Scratch::kGradient)
                                           : thread_scratch(size.key_size, plan.width, Scratch::kStrip);
    body(task, scratch, teams[walk].get(), strip);
  });
}

/// Large tensors written once: the kernel need not be asked for each 4 KB page.
void advise_huge_pages([[maybe_unused]] const at::Tensor& x) {
#ifdef __linux__
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  const auto address = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  const uintptr_t first = (address + kHugePage - 1) & ~(kHugePage - 1),
                  last = (address + x.nbytes()) & ~(kHugePage - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

/// Zeroes the rows past the last sequence; the kernel writes the others.
at::Tensor with_zero_tail(at::Tensor x, int64_t tokens) {
  if (x.size(0) > tokens) x.slice(0, tokens).zero_();
  return x;
}

at::Tensor output_like(const at::Tensor& like, int64_t tokens) {
  const at::Tensor x = at::empty(like.sizes(), like.options().memory_format(at::MemoryFormat::Contiguous));
  advise_huge_pages(x);
  return with_zero_tail(x, tokens);
}

at::Tensor gradient_like(const at::Tensor& like, int64_t tokens) {
  return with_zero_tail(empty_recycled(like.sizes(), like.scalar_type()), tokens);
}

template <typename T>
void forward(const HeldInputs& held, const at::Tensor& out_NHV, const at::Tensor& final_state, const at::Tensor& kept) {
  const ChunkInputs<T> in = held.pointers<T>();
  const ChunkOutputs<T> out{write_rows<T>(out_NHV), final_state.mutable_data_ptr<float>(),
                            kept.defined() ? kept.mutable_data_ptr<float>() : nullptr};
  const auto run = [&](const ChunkTask& task, const ChunkScratch& scratch, ChunkTeam* team = nullptr,
                       int64_t member = 0) { chunk_forward(in, out, task, scratch, team, member); };
  if (!run_teams(in.size, in.offsets, false, run)) run_tasks(in.size, in.offsets, Scratch::kForward, run);
}

std::tuple<at::Tensor, at::Tensor> run_forward(const HeldInputs& held, const at::Tensor& kept) {
  const at::Tensor out = output_like(held.v, held.tokens());
  const at::Tensor final_state =
      at::empty({held.offsets.numel() - 1, held.q.size(1), held.q.size(2), held.v.size(2)}, held.decay_log.options());
  if (held.v.scalar_type() == at::kBFloat16) {
    forward<c10::BFloat16>(held, out, final_state, kept);
  } else {
    forward<float>(held, out, final_state, kept);
  }
  return {out, final_state};
}

std::tuple<at::Tensor, at::Tensor> chunk_cpu(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                                             const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH,
                                             const at::Tensor& offsets, const at::Tensor& offsets_host,
                                             const std::optional<at::Tensor>& initial_state_BHKV, double scale) {
  check_arguments("kda_chunk", q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets, offsets_host, initial_state_BHKV);
  if (!has_cpu_kernel(q_NHK)) {
    return reference(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets, offsets_host, initial_state_BHKV, scale);
  }
  return run_forward({q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets_host, initial_state_BHKV, scale}, {});
}

/// Forward that also returns what the gradient needs of each chunk: [most_chunks, H, kept_rows, V], the first
/// num_chunks of them written.
std::tuple<at::Tensor, at::Tensor, at::Tensor> chunk_forward_cpu(
    const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV, const at::Tensor& decay_log_NHK,
    const at::Tensor& beta_NH, const at::Tensor& offsets, const at::Tensor& offsets_host,
    const std::optional<at::Tensor>& initial_state_BHKV, double scale) {
  check_arguments("kda_chunk", q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets, offsets_host, initial_state_BHKV);
  const HeldInputs held(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets_host, initial_state_BHKV, scale);
  static_assert(kKeptChunkRows == kChunkRows);
  const int64_t chunks = most_chunks(q_NHK.size(0), offsets_host.numel() - 1);
  const at::Tensor kept = empty_recycled({chunks, q_NHK.size(1), kept_rows(q_NHK.size(2)), v_NHV.size(2)}, at::kFloat);
  auto [out, final_state] = run_forward(held, kept);
  return {out, final_state, kept};
}

template <typename T>
void backward(const HeldInputs& held, const ChunkGradients<T>& grad) {
  const ChunkInputs<T> in = held.pointers<T>();
  const auto run = [&](const ChunkTask& task, const ChunkScratch& scratch, ChunkTeam* team = nullptr,
                       int64_t member = 0) { chunk_backward(in, grad, task, scratch, team, member); };
  if (!run_teams(in.size, in.offsets, true, run)) run_tasks(in.size, in.offsets, Scratch::kGradient, run);
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients chunk_backward_cpu(const at::Tensor& d_out_NHV, const std::optional<at::Tensor>& d_final_state_BHKV,
                             const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                             const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH, const at::Tensor& offsets_host,
                             const at::Tensor& kept, double scale) {
  const HeldInputs held(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets_host, std::nullopt, scale);
  const at::Tensor d_out = with_adjacent_columns(d_out_NHV);
  const at::Tensor d_final = d_final_state_BHKV.has_value() ? d_final_state_BHKV->contiguous() : at::Tensor();
  const int64_t tokens = held.tokens();
  const at::Tensor d_q = gradient_like(held.q, tokens), d_k = gradient_like(held.k, tokens);
  const at::Tensor d_v = gradient_like(held.v, tokens), d_decay_log = gradient_like(held.decay_log, tokens);
  const at::Tensor d_beta = gradient_like(held.beta, tokens);
  const at::Tensor d_initial =
      at::empty({offsets_host.numel() - 1, q_NHK.size(1), q_NHK.size(2), v_NHV.size(2)}, decay_log_NHK.options());
  constexpr size_t kCached = size_t{8} << 20;
  const bool past_caches = v_NHV.scalar_type() == at::kFloat && 3 * d_q.nbytes() + d_v.nbytes() > kCached;
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    backward<T>(held, {read_rows<T>(d_out), d_final.defined() ? d_final.const_data_ptr<float>() : nullptr,
                       kept.const_data_ptr<float>(), write_rows<T>(d_q), write_rows<T>(d_k), write_rows<T>(d_v),
                       write_rows<float>(d_decay_log), write_rows<float>(d_beta), d_initial.mutable_data_ptr<float>(),
                       past_caches});
  };
  if (v_NHV.scalar_type() == at::kBFloat16) {
    run(c10::BFloat16());
  } else {
    run(0.0f);
  }
  return {d_q, d_k, d_v, d_decay_log, d_beta, d_initial};
}

}  // namespace

}  // namespace furlong::kda

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("kda_chunk", furlong::kda::chunk_cpu);
  m.impl("_kda_chunk_forward", furlong::kda::chunk_forward_cpu);
  m.impl("_kda_chunk_backward", furlong::kda::chunk_backward_cpu);
}
