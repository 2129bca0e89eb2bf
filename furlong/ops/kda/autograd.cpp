// Gradients of kda_chunk; the step form has none and says so.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/kda/internal.h"
#include "furlong/ops/kda/recomputed.h"

namespace furlong::kda {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using ChunkSignature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                          const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                          const at::Tensor&, const std::optional<at::Tensor>&, double);

class ChunkFunction : public torch::autograd::Function<ChunkFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& q_NHK, const at::Tensor& k_NHK,
                               const at::Tensor& v_NHV, const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH,
                               const at::Tensor& offsets, const at::Tensor& offsets_host,
                               const std::optional<at::Tensor>& initial_state_BHKV, double scale) {
    using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double);
    static const auto op = find_op<Signature>("furlong::_kda_chunk_forward");
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, final_state, kept] =
        op.call(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets, offsets_host, initial_state_BHKV, scale);
    context->save_for_backward({q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets_host, kept});
    context->saved_data["scale"] = scale;
    context->saved_data["has_initial_state"] = initial_state_BHKV.has_value();
    context->set_materialize_grads(false);
    return {out, final_state};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double);
    static const auto op = find_op<Signature>("furlong::_kda_chunk_backward");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& v_NHV = saved[2];
    const at::Tensor d_out = gradients[0].defined() ? gradients[0] : at::zeros_like(v_NHV);
    const auto d_final_state = gradients[1].defined() ? std::optional(gradients[1]) : std::nullopt;
    auto [d_q, d_k, d_v, d_decay_log, d_beta, d_initial] =
        op.call(d_out, d_final_state, saved[0], saved[1], v_NHV, saved[3], saved[4], saved[5], saved[6],
                context->saved_data["scale"].toDouble());
    if (!context->saved_data["has_initial_state"].toBool()) d_initial = at::Tensor();
    return {d_q, d_k, d_v, d_decay_log, d_beta, {}, {}, d_initial, {}};
  }
};

std::tuple<at::Tensor, at::Tensor> chunk_autograd(const at::Tensor& q_NHK, const at::Tensor& k_NHK,
                                                  const at::Tensor& v_NHV, const at::Tensor& decay_log_NHK,
                                                  const at::Tensor& beta_NH, const at::Tensor& offsets,
                                                  const at::Tensor& offsets_host,
                                                  const std::optional<at::Tensor>& initial_state_BHKV, double scale) {
  const bool gradient = needs_gradient(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH) ||
                        (initial_state_BHKV.has_value() && needs_gradient(*initial_state_BHKV));
  if (!gradient) {
    static const auto op = find_op<ChunkSignature>("furlong::kda_chunk");
    at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets, offsets_host, initial_state_BHKV, scale);
  }
  const ChunkCall call{q_NHK, k_NHK,   v_NHV,        decay_log_NHK,      beta_NH, {},
                       {},    offsets, offsets_host, initial_state_BHKV, 0,       scale};
  if (has_recomputed_gradient(call)) return chunk_recomputed(call);
  if (!has_cpu_kernel(q_NHK) && !q_NHK.is_meta()) {
    return reference(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets, offsets_host, initial_state_BHKV, scale);
  }
  const variable_list result = ChunkFunction::apply(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets, offsets_host,
                                                    initial_state_BHKV, scale);
  return {result[0], result[1]};
}

at::Tensor step_autograd(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                         const at::Tensor& decay_log_BHK, const at::Tensor& beta_BH, at::Tensor state_SHKV,
                         const at::Tensor& slots_B, double scale) {
  if (at::GradMode::is_enabled()) {
    for (const at::Tensor& input : {q_BHK, k_BHK, v_BHV, decay_log_BHK, beta_BH, state_SHKV}) {
      check_argument(!input.requires_grad(), "kda_step_",
                     "got an input that requires a gradient: the step updates its state in place; use kda_chunk");
    }
  }
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, at::Tensor, const at::Tensor&, double);
  static const auto op = find_op<Signature>("furlong::kda_step_");
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(q_BHK, k_BHK, v_BHV, decay_log_BHK, beta_BH, state_SHKV, slots_B, scale);
}

}  // namespace

}  // namespace furlong::kda

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("kda_chunk", furlong::kda::chunk_autograd);
  m.impl("kda_step_", furlong::kda::step_autograd);
}

#ifndef FURLONG_CUDA
TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("kda_chunk", furlong::kda::reference);
}
#endif
