// Schema, argument checks, shapes and the C++ entry of moe_route.

#include "furlong/ops/moe/route/route.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/moe/route/route_op.h"

namespace furlong {

namespace moe_route_detail {

void check(const at::Tensor& logits_NE, const at::Tensor& bias_E, const RouteConfig& config,
           const std::optional<at::Tensor>& forced_ids_NA) {
  check_shape("moe_route", "logits_NE", logits_NE, {-1, -1});
  const int64_t num_experts = logits_NE.size(1);
  check_argument(logits_NE.scalar_type() == at::kFloat || logits_NE.scalar_type() == at::kDouble, "moe_route",
                 std::string("logits_NE: got ") + c10::toString(logits_NE.scalar_type()) +
                     ", need Float (routing in a lower precision changes the chosen experts)");
  check_shape("moe_route", "bias_E", bias_E, {num_experts});
  check_dtype("moe_route", "bias_E", bias_E, logits_NE.scalar_type());
  check_argument(config.num_chosen >= 1 && config.num_chosen <= num_experts, "moe_route",
                 "num_chosen: got " + std::to_string(config.num_chosen) + ", need 1 to " + std::to_string(num_experts));
  check_argument(
      config.num_groups >= 1 && num_experts % config.num_groups == 0, "moe_route",
      "num_groups: got " + std::to_string(config.num_groups) + ", need a divisor of " + std::to_string(num_experts));
  check_argument(
      config.groups_kept >= 1 && config.groups_kept <= config.num_groups, "moe_route",
      "groups_kept: got " + std::to_string(config.groups_kept) + ", need 1 to " + std::to_string(config.num_groups));
  check_argument(config.num_chosen <= num_experts / config.num_groups * config.groups_kept, "moe_route",
                 "num_chosen: got " + std::to_string(config.num_chosen) + ", more than the kept groups hold");
  if (!forced_ids_NA) return;
  check_shape("moe_route", "forced_ids_NA", *forced_ids_NA, {logits_NE.size(0), config.num_chosen});
  check_dtype("moe_route", "forced_ids_NA", *forced_ids_NA, at::kLong);
}

namespace {

Outputs meta(const at::Tensor& logits_NE, const at::Tensor& bias_E, int64_t num_chosen, int64_t num_groups,
             int64_t groups_kept, bool renormalize, double scale, const std::optional<at::Tensor>& forced_ids_NA) {
  check(logits_NE, bias_E, {num_chosen, num_groups, groups_kept, renormalize, scale}, forced_ids_NA);
  const int64_t tokens = logits_NE.size(0);
  const auto options = logits_NE.options();
  return {at::empty({tokens, num_chosen}, options.dtype(at::kLong)), at::empty({tokens, num_chosen}, options),
          at::empty_like(logits_NE), at::empty({tokens}, options), at::empty({tokens}, options)};
}

at::Tensor backward_meta(const at::Tensor& /*grad_weights_NA*/, const at::Tensor& /*ids_NA*/,
                         const at::Tensor& scores_NE, bool /*renormalize*/, double /*scale*/) {
  return at::empty_like(scores_NE);
}

}  // namespace

}  // namespace moe_route_detail

RouteOutput moe_route(const at::Tensor& logits_NE, const at::Tensor& bias_E, const RouteConfig& config,
                      const std::optional<at::Tensor>& forced_ids_NA) {
  using Signature = moe_route_detail::Outputs(const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t, bool,
                                              double, const std::optional<at::Tensor>&);
  static const auto op = find_op<Signature>("furlong::moe_route");
  auto [ids, weights, scores, cutoff, margin] =
      op.call(logits_NE, bias_E, config.num_chosen, config.num_groups, config.groups_kept, config.renormalize,
              config.scale, forced_ids_NA);
  return {ids, weights, scores, cutoff, margin};
}

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def(
      "moe_route(Tensor logits, Tensor bias, int num_chosen, int num_groups, int groups_kept, bool renormalize, "
      "float scale, Tensor? forced_ids) -> (Tensor ids, Tensor weights, Tensor scores, Tensor cutoff, Tensor margin)");
  m.def("_moe_route_backward(Tensor grad_weights, Tensor ids, Tensor scores, bool renormalize, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("moe_route", moe_route_detail::meta);
  m.impl("_moe_route_backward", moe_route_detail::backward_meta);
}

}  // namespace furlong
