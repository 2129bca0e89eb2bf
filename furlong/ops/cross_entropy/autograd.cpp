// Gradient of the loss: computed in the forward pass where one is needed, saved, and scaled by what the backward pass
// receives.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/cross_entropy/cross_entropy.h"

namespace furlong {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A training step differentiates the loss itself: on the CPU, where looking costs nothing, a factor of exactly 1 is
/// not multiplied.
at::Tensor scaled(const at::Tensor& gradient, const at::Tensor& factor) {
  return factor.is_cpu() && factor.item<double>() == 1.0 ? gradient : gradient.mul(factor);
}

struct LinearCrossEntropyFunction : torch::autograd::Function<LinearCrossEntropyFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden_ND, const at::Tensor& head_VD,
                               const at::Tensor& targets_N, const at::Tensor& token_weight_N) {
    using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                                                 const at::Tensor&, const at::Tensor&);
    static const auto op = find_op<Signature>("furlong::_linear_cross_entropy_with_gradients");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [loss, nll_N, dhidden_ND, dhead_VD] = op.call(hidden_ND, head_VD, targets_N, token_weight_N);
    context->save_for_backward({dhidden_ND, dhead_VD});
    context->mark_non_differentiable({nll_N});
    return {loss, nll_N};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    return {scaled(saved[0], grads[0]), scaled(saved[1], grads[0]), at::Tensor(), at::Tensor()};
  }
};

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy_autograd(const at::Tensor& hidden_ND, const at::Tensor& head_VD,
                                                                 const at::Tensor& targets_N,
                                                                 const at::Tensor& token_weight_N) {
  if (!needs_gradient(hidden_ND, head_VD)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return linear_cross_entropy(hidden_ND, head_VD, targets_N, token_weight_N);
  }
  const variable_list results = LinearCrossEntropyFunction::apply(hidden_ND, head_VD, targets_N, token_weight_N);
  return {results[0], results[1]};
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("linear_cross_entropy", furlong::linear_cross_entropy_autograd);
}
