// Gradients of the norms. CPU kernels have fused backward kernels, which recompute the row statistics from x instead of
// saving them; every other tensor differentiates through the reference.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/norm/checks.h"
#include "furlong/ops/norm/norm.h"
#include "furlong/ops/norm/reference.h"

namespace furlong {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x, weight});
    context->saved_data["eps"] = eps;
    return rms_norm(x, weight, eps);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    using Signature =
        std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, double);
    static const auto op = find_op<Signature>("furlong::_rms_norm_backward");
    const variable_list saved = context->get_saved_variables();
    auto [dx, dweight] = op.call(grads[0], saved[0], saved[1], context->saved_data["eps"].toDouble());
    return {dx, dweight, at::Tensor()};
  }
};

struct GatedRmsNormFunction : torch::autograd::Function<GatedRmsNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& gate, double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x, weight, gate});
    context->saved_data["eps"] = eps;
    return gated_rms_norm(x, weight, gate, eps);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                                     const at::Tensor&, const at::Tensor&, double);
    static const auto op = find_op<Signature>("furlong::_gated_rms_norm_backward");
    const variable_list saved = context->get_saved_variables();
    auto [dx, dweight, dgate] = op.call(grads[0], saved[0], saved[1], saved[2], context->saved_data["eps"].toDouble());
    return {dx, dweight, dgate, at::Tensor()};
  }
};

struct L2NormFunction : torch::autograd::Function<L2NormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x});
    context->saved_data["eps"] = eps;
    return l2_norm(x, eps);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op =
        find_op<at::Tensor(const at::Tensor&, const at::Tensor&, double)>("furlong::_l2_norm_backward");
    const variable_list saved = context->get_saved_variables();
    return {op.call(grads[0], saved[0], context->saved_data["eps"].toDouble()), at::Tensor()};
  }
};

at::Tensor rms_norm_autograd(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (has_cpu_kernel(x)) return RmsNormFunction::apply(x, weight, eps);
  check_rms_norm(x, weight);
  return rms_norm_reference(x, weight, eps);
}

at::Tensor gated_rms_norm_autograd(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& gate, double eps) {
  if (has_cpu_kernel(x)) return GatedRmsNormFunction::apply(x, weight, gate, eps);
  check_gated_rms_norm(x, weight, gate);
  return gated_rms_norm_reference(x, weight, gate, eps);
}

at::Tensor l2_norm_autograd(const at::Tensor& x, double eps) {
  if (has_cpu_kernel(x)) return L2NormFunction::apply(x, eps);
  check_l2_norm(x);
  return l2_norm_reference(x, eps);
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("rms_norm", furlong::rms_norm_autograd);
  m.impl("gated_rms_norm", furlong::gated_rms_norm_autograd);
  m.impl("l2_norm", furlong::l2_norm_autograd);
}
