// Gradients of short_conv; the step form has none and says so.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/short_conv/internal.h"

namespace furlong::short_conv_detail {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class ConvFunction : public torch::autograd::Function<ConvFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x_NP, const at::Tensor& weight_PW,
                               const at::Tensor& offsets, const at::Tensor& offsets_host,
                               const std::optional<at::Tensor>& initial_tail_BTP) {
    using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                         const at::Tensor&, const std::optional<at::Tensor>&);
    static const auto op = find_op<Signature>("furlong::short_conv");
    at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({x_NP, weight_PW, offsets_host, initial_tail_BTP.value_or(at::Tensor())});
    context->set_materialize_grads(false);
    auto [y, tail] = op.call(x_NP, weight_PW, offsets, offsets_host, initial_tail_BTP);
    return {y, tail};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const std::optional<at::Tensor>&);
    static const auto op = find_op<Signature>("furlong::_short_conv_backward");
    const auto optional = [](const at::Tensor& x) { return x.defined() ? std::optional(x) : std::nullopt; };
    const variable_list saved = context->get_saved_variables();
    const at::Tensor d_y = gradients[0].defined() ? gradients[0] : at::zeros_like(saved[0]);
    auto [d_x, d_weight, d_tail] =
        op.call(d_y, optional(gradients[1]), saved[0], saved[1], saved[2], optional(saved[3]));
    return {d_x, d_weight, {}, {}, saved[3].defined() ? d_tail : at::Tensor()};
  }
};

std::tuple<at::Tensor, at::Tensor> conv_autograd(const at::Tensor& x_NP, const at::Tensor& weight_PW,
                                                 const at::Tensor& offsets, const at::Tensor& offsets_host,
                                                 const std::optional<at::Tensor>& initial_tail_BTP) {
  const bool too_wide = x_NP.is_cuda() && weight_PW.size(1) > kMaxCudaKernelWidth;
  if (!has_kernel(x_NP) || too_wide) return reference(x_NP, weight_PW, offsets, offsets_host, initial_tail_BTP);
  const variable_list result = ConvFunction::apply(x_NP, weight_PW, offsets, offsets_host, initial_tail_BTP);
  return {result[0], result[1]};
}

at::Tensor step_autograd(const at::Tensor& x_BP, const at::Tensor& weight_PW, at::Tensor tail_STP,
                         const at::Tensor& slots_B) {
  if (at::GradMode::is_enabled()) {
    for (const at::Tensor& input : {x_BP, weight_PW, tail_STP}) {
      check_argument(!input.requires_grad(), "short_conv_step_",
                     "got an input that requires a gradient: the step updates its tail in place; use short_conv");
    }
  }
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, at::Tensor, const at::Tensor&);
  static const auto op = find_op<Signature>("furlong::short_conv_step_");
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x_BP, weight_PW, tail_STP, slots_B);
}

}  // namespace

}  // namespace furlong::short_conv_detail

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("short_conv", furlong::short_conv_detail::conv_autograd);
  m.impl("short_conv_step_", furlong::short_conv_detail::step_autograd);
}
