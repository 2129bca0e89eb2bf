// kda_chunk on CPU tensors: from tensors to the pointers of the kernels, and the split over threads.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <memory>

#include "furlong/base/parallel.h"
#include "furlong/ops/common/kernel.h"
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

/// This thread's working memory, kept from call to call: fresh pages would cost a short call more than its work.
const ChunkScratch& thread_scratch(int64_t K, int64_t V, bool gradient) {
  thread_local std::unique_ptr<ChunkMemory> kept[2];
  auto& memory = kept[gradient];
  K = round_up(K, kBlockRows);
  V = round_up(V, kBlockRows);
  if (memory == nullptr || memory->scratch().K != K || memory->scratch().V != V) {
    memory = std::make_unique<ChunkMemory>(K, V, gradient);
  }
  return memory->scratch();
}

/// Runs body(task, scratch) for all tasks of the plan, one worker a thread.
template <typename Body>
void run_tasks(const ChunkSizes& size, const int64_t* offsets, bool gradient, const Body& body) {
  const auto plan = plan_tasks(size, offsets, num_threads());
  parallel_for(0, static_cast<int64_t>(plan.size()), 1, [&](int64_t first, int64_t last) {
    const ChunkScratch& scratch = thread_scratch(size.key_size, size.value_size, gradient);
    for (int64_t worker = first; worker < last; ++worker) {
      for (const ChunkTask& task : plan[worker]) body(task, scratch);
    }
  });
}

/// With two or more threads for each (sequence, head): a team each, on strips of value columns. False, with nothing
/// done, if there are not enough threads, or no sequence is long enough for it.
template <typename T>
bool run_teams(const ChunkInputs<T>& in, const ChunkOutputs<T>& out) {
  constexpr int64_t kLong = 4 * kChunkRows;
  const ChunkSizes& size = in.size;
  const int64_t walks = size.sequences * size.heads;
  int64_t longest = 0;
  for (int64_t b = 0; b < size.sequences; ++b) longest = std::max(longest, in.offsets[b + 1] - in.offsets[b]);
  if (walks == 0 || longest < kLong) return false;
  const int64_t most = std::min<int64_t>(num_threads() / walks, size.value_size / kBlockRows);
  if (most < 2) return false;
  const int64_t width = round_up((size.value_size + most - 1) / most, kBlockRows);
  const int64_t strips = (size.value_size + width - 1) / width;
  std::vector<std::unique_ptr<ChunkTeam>> teams;
  std::vector<std::unique_ptr<ChunkMemory>> memory;
  const int64_t K = round_up(size.key_size, kBlockRows);
  for (int64_t walk = 0; walk < walks; ++walk) {
    teams.push_back(std::make_unique<ChunkTeam>(K, strips));
    for (int64_t strip = 0; strip < strips; ++strip) memory.push_back(std::make_unique<ChunkMemory>(K, width, false));
  }
  return run_together(walks * strips, [&](int64_t worker) {
    const int64_t walk = worker / strips, strip = worker % strips, first = strip * width;
    const ChunkTask task{walk / size.heads, walk % size.heads, first, std::min(width, size.value_size - first)};
    chunk_forward(in, out, task, memory[worker]->scratch(), teams[walk].get(), strip);
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

/// Fresh tensor whose rows past the last sequence are zero; the kernel writes the others.
at::Tensor token_tensor(const at::Tensor& like, int64_t tokens) {
  at::Tensor x = at::empty(like.sizes(), like.options().memory_format(at::MemoryFormat::Contiguous));
  advise_huge_pages(x);
  if (x.size(0) > tokens) x.slice(0, tokens).zero_();
  return x;
}

template <typename T>
void forward(const HeldInputs& held, const at::Tensor& out_NHV, const at::Tensor& final_state, const at::Tensor& kept) {
  const ChunkInputs<T> in = held.pointers<T>();
  const ChunkOutputs<T> out{write_rows<T>(out_NHV), final_state.mutable_data_ptr<float>(),
                            kept.defined() ? kept.mutable_data_ptr<float>() : nullptr};
  if (run_teams(in, out)) return;
  run_tasks(in.size, in.offsets, false,
            [&](const ChunkTask& task, const ChunkScratch& scratch) { chunk_forward(in, out, task, scratch); });
}

std::tuple<at::Tensor, at::Tensor> run_forward(const HeldInputs& held, const at::Tensor& kept) {
  const at::Tensor out = token_tensor(held.v, held.tokens());
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
  const at::Tensor kept =
      at::empty({chunks, q_NHK.size(1), kept_rows(q_NHK.size(2)), v_NHV.size(2)}, decay_log_NHK.options());
  advise_huge_pages(kept);
  auto [out, final_state] = run_forward(held, kept);
  return {out, final_state, kept};
}

template <typename T>
void backward(const HeldInputs& held, const ChunkGradients<T>& grad) {
  const ChunkInputs<T> in = held.pointers<T>();
  run_tasks(in.size, in.offsets, true,
            [&](const ChunkTask& task, const ChunkScratch& scratch) { chunk_backward(in, grad, task, scratch); });
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
  const at::Tensor d_q = token_tensor(held.q, tokens), d_k = token_tensor(held.k, tokens);
  const at::Tensor d_v = token_tensor(held.v, tokens), d_decay_log = token_tensor(held.decay_log, tokens);
  const at::Tensor d_beta = token_tensor(held.beta, tokens);
  const at::Tensor d_initial =
      at::empty({offsets_host.numel() - 1, q_NHK.size(1), q_NHK.size(2), v_NHV.size(2)}, decay_log_NHK.options());
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    backward<T>(held, {read_rows<T>(d_out), d_final.defined() ? d_final.const_data_ptr<float>() : nullptr,
                       kept.const_data_ptr<float>(), write_rows<T>(d_q), write_rows<T>(d_k), write_rows<T>(d_v),
                       write_rows<float>(d_decay_log), write_rows<float>(d_beta), d_initial.mutable_data_ptr<float>()});
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
