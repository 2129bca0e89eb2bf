// Gradient of moe_route: with w_hat = s / sum s over the chosen experts,
//   d logit_e = scale / sum s * (dw_e - sum_j w_hat_j dw_j) * s_e (1 - s_e)   for chosen e, else 0.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/moe/route/route_op.h"

namespace furlong::moe_route_detail {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Route : torch::autograd::Function<Route> {
  static variable_list forward(AutogradContext* context, const at::Tensor& logits_NE, const at::Tensor& bias_E,
                               const RouteConfig& config, const std::optional<at::Tensor>& forced_ids_NA) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const RouteOutput out = moe_route(logits_NE, bias_E, config, forced_ids_NA);
    context->save_for_backward({out.ids_NA, out.scores_NE});
    context->saved_data["renormalize"] = config.renormalize;
    context->saved_data["scale"] = config.scale;
    context->mark_non_differentiable({out.ids_NA, out.scores_NE, out.cutoff_N, out.margin_N});
    return {out.ids_NA, out.weights_NA, out.scores_NE, out.cutoff_N, out.margin_N};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op = find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool, double)>(
        "furlong::_moe_route_backward");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor grad_logits =
        op.call(gradients[1], saved[0], saved[1], context->saved_data["renormalize"].toBool(),
                context->saved_data["scale"].toDouble());
    return {grad_logits, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

Outputs with_gradient(const at::Tensor& logits_NE, const at::Tensor& bias_E, int64_t num_chosen, int64_t num_groups,
                      int64_t groups_kept, bool renormalize, double scale,
                      const std::optional<at::Tensor>& forced_ids_NA) {
  const variable_list out = Route::apply(
      logits_NE, bias_E, RouteConfig{num_chosen, num_groups, groups_kept, renormalize, scale}, forced_ids_NA);
  return {out[0], out[1], out[2], out[3], out[4]};
}

}  // namespace

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("moe_route", with_gradient);
}

}  // namespace furlong::moe_route_detail
