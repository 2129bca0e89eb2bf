// Gradient of the read. The CPU kernel has a fused backward kernel for all sources at once; every other tensor
// differentiates through the reference.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "furlong/ops/attnres/attnres.h"
#include "furlong/ops/attnres/checks.h"
#include "furlong/ops/attnres/reference.h"
#include "furlong/ops/common/kernel.h"

namespace furlong {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct AttnResReadFunction : torch::autograd::Function<AttnResReadFunction> {
  static variable_list forward(AutogradContext* context, at::TensorList sources_ND, const at::Tensor& w_D, double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    variable_list saved(sources_ND.begin(), sources_ND.end());
    saved.push_back(w_D);
    context->save_for_backward(std::move(saved));
    context->saved_data["eps"] = eps;
    auto [out_ND, p_NS] = attnres_read(sources_ND, w_D, eps);
    context->mark_non_differentiable({p_NS});
    return {out_ND, p_NS};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    using Signature =
        std::tuple<std::vector<at::Tensor>, at::Tensor>(const at::Tensor&, at::TensorList, const at::Tensor&, double);
    static const auto op = find_op<Signature>("furlong::_attnres_read_backward");
    const variable_list saved = context->get_saved_variables();
    const at::TensorList sources_ND(saved.data(), saved.size() - 1);
    auto [gradients, dw_D] = op.call(grads[0], sources_ND, saved.back(), context->saved_data["eps"].toDouble());
    gradients.push_back(dw_D);
    gradients.emplace_back();  // eps
    return gradients;
  }
};

std::tuple<at::Tensor, at::Tensor> attnres_read_autograd(at::TensorList sources_ND, const at::Tensor& w_D, double eps) {
  check_attnres_read(sources_ND, w_D);
  if (!has_cpu_kernel(sources_ND[0])) return attnres_read_reference(sources_ND, w_D, eps);
  const variable_list results = AttnResReadFunction::apply(sources_ND, w_D, eps);
  return {results[0], results[1]};
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("attnres_read", furlong::attnres_read_autograd);
}
