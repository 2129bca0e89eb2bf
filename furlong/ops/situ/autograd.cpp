// Gradients of the gated activations. CPU kernels have fused backward kernels, which recompute tanh and sigmoid from
// the saved inputs; every other tensor differentiates through the reference.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/situ/checks.h"
#include "furlong/ops/situ/reference.h"
#include "furlong/ops/situ/situ.h"

namespace furlong {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Pair = std::tuple<at::Tensor, at::Tensor>;

struct SituGluFunction : torch::autograd::Function<SituGluFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up, double beta,
                            std::optional<double> linear_beta) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({gate, up});
    context->saved_data["beta"] = beta;
    context->saved_data["linear_beta"] = linear_beta;
    return situ_glu(gate, up, beta, linear_beta);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    using Signature = Pair(const at::Tensor&, const at::Tensor&, const at::Tensor&, double, std::optional<double>);
    static const auto op = find_op<Signature>("furlong::_situ_glu_backward");
    const variable_list saved = context->get_saved_variables();
    auto [dgate, dup] = op.call(grads[0], saved[0], saved[1], context->saved_data["beta"].toDouble(),
                                context->saved_data["linear_beta"].toOptional<double>());
    return {dgate, dup, at::Tensor(), at::Tensor()};
  }
};

struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({gate, up});
    return swiglu(gate, up);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op =
        find_op<Pair(const at::Tensor&, const at::Tensor&, const at::Tensor&)>("furlong::_swiglu_backward");
    const variable_list saved = context->get_saved_variables();
    auto [dgate, dup] = op.call(grads[0], saved[0], saved[1]);
    return {dgate, dup};
  }
};

at::Tensor situ_glu_autograd(const at::Tensor& gate, const at::Tensor& up, double beta,
                             std::optional<double> linear_beta) {
  if (has_cpu_kernel(gate)) return SituGluFunction::apply(gate, up, beta, linear_beta);
  check_situ_glu(gate, up, beta, linear_beta);
  return situ_glu_reference(gate, up, beta, linear_beta);
}

at::Tensor swiglu_autograd(const at::Tensor& gate, const at::Tensor& up) {
  if (has_cpu_kernel(gate)) return SwigluFunction::apply(gate, up);
  check_swiglu(gate, up);
  return swiglu_reference(gate, up);
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("situ_glu", furlong::situ_glu_autograd);
  m.impl("swiglu", furlong::swiglu_autograd);
}
