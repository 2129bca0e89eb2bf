// kda_chunk, kda_chunk_fused and their gradient on CUDA tensors: from tensors to the launchers' arguments.
//   N packed tokens   B sequences   H heads   K key size   V value size

#include <ATen/ops/empty.h>

#include <algorithm>

#include "furlong/ops/common/cuda_launch.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/kda/cuda/args.h"
#include "furlong/ops/kda/cuda/backward_args.h"
#include "furlong/ops/kda/internal.h"
#include "furlong/ops/kda/recomputed.h"

namespace furlong::kda {

namespace {

constexpr int64_t kMaxSize = 256;

cuda::Rows rows_of(const at::Tensor& x) {
  return {x.const_data_ptr(), x.stride(0), x.stride(1), is_bf16(x) ? cuda::Element::kBFloat16 : cuda::Element::kFloat};
}

/// Rows that 16-byte copies can read; a view that cannot is copied.
at::Tensor with_aligned_rows(const at::Tensor& x) {
  const int64_t unit = 16 / x.element_size();
  const bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 && x.stride(0) % unit == 0 &&
                       x.stride(1) % unit == 0 && (x.size(-1) <= 1 || x.stride(-1) == 1);
  return aligned ? x : x.clone(at::MemoryFormat::Contiguous);
}

/// A call's tensors, kept alive for the pointers of its arguments.
struct HeldChunk {
  at::Tensor q, k, v, gate, beta, a_log, dt_bias, offsets, initial;
  cuda::Inputs in;

  HeldChunk(const char* op, const ChunkCall& call)
      : q(with_aligned_rows(call.q_NHK)),
        k(with_aligned_rows(call.k_NHK)),
        v(with_aligned_rows(call.v_NHV)),
        gate(with_aligned_rows(call.gate_NHK)),
        beta(call.beta_NH),
        offsets(call.offsets.contiguous()) {
    const bool fused = call.a_log_H.has_value();
    if (fused) a_log = call.a_log_H->contiguous(), dt_bias = call.dt_bias_HK->contiguous();
    if (call.initial_state_BHKV.has_value()) initial = call.initial_state_BHKV->contiguous();
    for (const at::Tensor* x : {&k, &v, &gate, &beta, &offsets}) check_same_device(op, "inputs", *x, q);
    for (const at::Tensor* x : {&a_log, &dt_bias, &initial}) {
      if (x->defined()) check_same_device(op, "parameters and state", *x, q);
    }
    in.q_NHK = rows_of(q), in.k_NHK = rows_of(k), in.v_NHV = rows_of(v), in.gate_NHK = rows_of(gate);
    in.beta_NH = rows_of(beta);
    in.beta_is_logit = in.l2_norm = fused;
    in.l2_eps = static_cast<float>(kNormEps);
    in.lower_bound = static_cast<float>(call.lower_bound);
    if (fused) {
      in.gate_form = call.lower_bound < 0 ? cuda::GateForm::kBounded : cuda::GateForm::kSoftplus;
      in.a_log_H = a_log.const_data_ptr<float>(), in.dt_bias_HK = dt_bias.const_data_ptr<float>();
    }
    in.scale = static_cast<float>(call.scale);
    in.offsets = offsets.const_data_ptr<int64_t>();
    in.tokens = q.size(0), in.sequences = offsets.numel() - 1, in.heads = q.size(1);
    in.key_size = q.size(2), in.value_size = v.size(2);
  }
  const float* initial_state() const { return initial.defined() ? initial.const_data_ptr<float>() : nullptr; }
};

at::Tensor workspace_of(size_t bytes, const at::Tensor& like) {
  return at::empty({static_cast<int64_t>(bytes)}, like.options().dtype(at::kByte));
}

std::tuple<at::Tensor, at::Tensor> forward(const char* op, const ChunkCall& call) {
  const c10::cuda::CUDAGuard guard(call.q_NHK.device());
  const HeldChunk held(op, call);
  const at::Tensor out = at::empty(held.v.sizes(), held.v.options());
  const at::Tensor final_state = at::empty({held.in.sequences, held.in.heads, held.in.key_size, held.in.value_size},
                                           held.v.options().dtype(at::kFloat));
  cuda::ForwardArgs args;
  args.in = held.in;
  args.out_NHV = out.mutable_data_ptr();
  args.initial_state_SHKV = held.initial_state();
  args.final_state_SHKV = final_state.mutable_data_ptr<float>();
  const auto* starts = call.offsets_host.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < held.in.sequences; ++b) {
    const int64_t length = starts[b + 1] - starts[b];
    args.longest = std::max(args.longest, length);
    if (cuda::split_segments(length, held.in.heads) > 1) ++args.splits;
  }
  args.workspace_bytes = cuda::forward_workspace_bytes(args);
  const at::Tensor workspace = workspace_of(args.workspace_bytes, held.q);
  args.workspace = workspace.mutable_data_ptr();
  args.stream = c10::cuda::getCurrentCUDAStream();
  check_launch(op, cuda::launch_forward(args));
  return {out, final_state};
}

bool has_sizes(const at::Tensor& q_NHK, const at::Tensor& v_NHV) {
  return has_kernel(q_NHK) && q_NHK.size(2) <= kMaxSize && v_NHV.size(2) <= kMaxSize;
}

std::tuple<at::Tensor, at::Tensor> chunk_cuda(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                                              const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH,
                                              const at::Tensor& offsets, const at::Tensor& offsets_host,
                                              const std::optional<at::Tensor>& initial_state_BHKV, double scale) {
  check_arguments("kda_chunk", q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets, offsets_host, initial_state_BHKV);
  if (!has_sizes(q_NHK, v_NHV)) {
    return reference(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets, offsets_host, initial_state_BHKV, scale);
  }
  return forward(
      "kda_chunk",
      {q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, {}, {}, offsets, offsets_host, initial_state_BHKV, 0, scale});
}

std::tuple<at::Tensor, at::Tensor> fused_cuda(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                                              const at::Tensor& z_NHK, const at::Tensor& beta_logit_NH,
                                              const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK,
                                              const at::Tensor& offsets, const at::Tensor& offsets_host,
                                              const std::optional<at::Tensor>& initial_state_BHKV, double lower_bound,
                                              double scale) {
  check_fused("kda_chunk_fused", q_NHK, k_NHK, v_NHV, z_NHK, beta_logit_NH, a_log_H, dt_bias_HK, offsets, offsets_host,
              initial_state_BHKV);
  if (!has_sizes(q_NHK, v_NHV)) {
    return chunk_fused_composed(q_NHK, k_NHK, v_NHV, z_NHK, beta_logit_NH, a_log_H, dt_bias_HK, offsets, offsets_host,
                                initial_state_BHKV, lower_bound, scale);
  }
  return forward("kda_chunk_fused", {q_NHK, k_NHK, v_NHV, z_NHK, beta_logit_NH, a_log_H, dt_bias_HK, offsets,
                                     offsets_host, initial_state_BHKV, lower_bound, scale});
}

using Gradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// The gradients' tensors, and their pointers in `args`. d_initial is given: the walk has written it already.
Gradients allocate_gradients(const HeldChunk& held, int64_t tokens, const at::Tensor& d_initial,
                             cuda::BackwardArgs& args) {
  const auto rows = [&](const at::Tensor& like) {
    at::Tensor x = at::empty(like.sizes(), like.options());
    if (x.size(0) > tokens) x.slice(0, tokens).zero_();
    return x;
  };
  const auto fp32 = held.v.options().dtype(at::kFloat);
  const int64_t H = held.in.heads, K = held.in.key_size;
  const at::Tensor d_q = rows(held.q), d_k = rows(held.k), d_v = rows(held.v), d_gate = rows(held.gate);
  const at::Tensor d_beta = rows(held.beta), d_a_log = at::empty({H}, fp32), d_dt_bias = at::empty({H, K}, fp32);
  args.d_q_NHK = d_q.mutable_data_ptr(), args.d_k_NHK = d_k.mutable_data_ptr(), args.d_v_NHV = d_v.mutable_data_ptr();
  args.d_gate_NHK = d_gate.mutable_data_ptr(), args.d_beta_NH = d_beta.mutable_data_ptr();
  args.d_a_log_H = d_a_log.mutable_data_ptr<float>(), args.d_dt_bias_HK = d_dt_bias.mutable_data_ptr<float>();
  return {d_q, d_k, d_v, d_gate, d_beta, d_a_log, d_dt_bias, d_initial};
}

Gradients gradient_cuda(const at::Tensor& d_out_NHV, const std::optional<at::Tensor>& d_final_state_BHKV,
                        const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                        const at::Tensor& gate_NHK, const at::Tensor& beta_NH, const std::optional<at::Tensor>& a_log_H,
                        const std::optional<at::Tensor>& dt_bias_HK, const at::Tensor& offsets,
                        const at::Tensor& offsets_host, const std::optional<at::Tensor>& initial_state_BHKV,
                        double lower_bound, double scale) {
  const char* op = "_kda_chunk_gradient";
  const c10::cuda::CUDAGuard guard(q_NHK.device());
  const auto near = [](const at::Tensor& x) {
    return x.stride(0) < cuda::kWidestTokenStride ? x : x.clone(at::MemoryFormat::Contiguous);
  };
  const HeldChunk held(op, {near(q_NHK), near(k_NHK), near(v_NHV), near(gate_NHK), beta_NH, a_log_H, dt_bias_HK,
                            offsets, offsets_host, initial_state_BHKV, lower_bound, scale});
  const at::Tensor d_out = with_aligned_rows(near(d_out_NHV));
  const at::Tensor d_final = d_final_state_BHKV.has_value() ? d_final_state_BHKV->contiguous() : at::Tensor();
  const int64_t tokens = offsets_host.const_data_ptr<int64_t>()[offsets_host.numel() - 1];
  cuda::BackwardArgs args;
  args.in = held.in;
  args.d_out_NHV = rows_of(d_out);
  args.initial_state_BHKV = held.initial_state();
  args.d_final_state_BHKV = d_final.defined() ? d_final.const_data_ptr<float>() : nullptr;
  args.stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor d_initial = at::empty({held.in.sequences, held.in.heads, held.in.key_size, held.in.value_size},
                                         held.v.options().dtype(at::kFloat));
  args.d_initial_state_BHKV = d_initial.mutable_data_ptr<float>();
  if (!cuda::has_tensor_core_backward(args)) {
    check_argument(!a_log_H.has_value(), op, "the fused gradient needs bf16 and head sizes of 64 or 128");
    const at::Tensor kept = workspace_of(cuda::backward_any_bytes(args.in), held.q);
    args.kept = kept.mutable_data_ptr();
    const Gradients gradients = allocate_gradients(held, tokens, d_initial, args);
    check_launch(op, cuda::launch_backward_any(args));
    return gradients;
  }
  const at::Tensor kept = workspace_of(cuda::backward_kept_bytes(args.in), held.q);
  at::Tensor early = workspace_of(cuda::backward_early_bytes(args.in), held.q);
  args.kept = kept.mutable_data_ptr(), args.early = early.mutable_data_ptr();
  check_launch(op, cuda::launch_backward_walk(args));
  early = at::Tensor();  // its memory serves the gradients: the allocator reuses it in stream order
  const Gradients gradients = allocate_gradients(held, tokens, d_initial, args);
  check_launch(op, cuda::launch_backward_finish(args));
  return gradients;
}

}  // namespace

}  // namespace furlong::kda

TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("kda_chunk", furlong::kda::chunk_cuda);
  m.impl("kda_chunk_fused", furlong::kda::fused_cuda);
  m.impl("_kda_chunk_gradient", furlong::kda::gradient_cuda);
}
