#include "furlong/ops/moe/layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/index_counts.h"
#include "furlong/ops/common/linear.h"
#include "furlong/ops/moe/experts/experts.h"
#include "furlong/ops/norm/norm.h"

namespace furlong {

MoeLayer::MoeLayer(const MoeLayerConfig& config) : config_(config) {
  if (config.num_shared_experts == 0) return;
  shared_ = std::make_unique<GluMlp>(GluMlpConfig{.hidden_size = config.hidden_size,
                                                  .intermediate_size = config.num_shared_experts * config.expert_size,
                                                  .activation = config.activation,
                                                  .init_std = config.init_std});
}

void MoeLayer::declare(ParamList& list, const std::string& prefix) {
  const int64_t hidden = config_.hidden_size, experts = config_.num_experts, width = config_.expert_size;
  const int64_t input = config_.latent_size > 0 ? config_.latent_size : hidden;
  const auto matrix = [&](const char* name, std::vector<int64_t> shape, at::Tensor* tensor) {
    ParamSpec spec{.name = name, .shape = shape, .rule = OptimizerRule::kMuon, .init = Init::normal(config_.init_std)};
    if (spec.stacked()) {
      spec.muon_blocks = experts;
      spec.routed_expert = true;
    }
    if (tensor == &gate_) spec.dtype = DtypePolicy::kFp32;
    list.add(prefix, spec, tensor);
  };
  matrix("gate.weight", {experts, hidden}, &gate_);
  list.add(prefix,
           {.name = "gate.e_score_correction_bias",
            .shape = {experts},
            .dtype = DtypePolicy::kFp32,
            .rule = OptimizerRule::kFrozen,
            .weight_decay = false,
            .init = Init::constant(0)},
           &correction_bias_);
  if (shared_) shared_->declare(list, prefix + "shared_experts.");
  if (config_.latent_size > 0) {
    matrix("routed_expert_down_proj.weight", {input, hidden}, &down_proj_);
    if (config_.latent_norm) {
      list.add(
          prefix,
          {.name = "routed_expert_norm.weight", .shape = {input}, .weight_decay = false, .init = Init::constant(1)},
          &norm_);
    }
    matrix("routed_expert_up_proj.weight", {hidden, input}, &up_proj_);
  }
  matrix("experts.{}.w1.weight", {experts, width, input}, &w1_);
  matrix("experts.{}.w3.weight", {experts, width, input}, &w3_);
  matrix("experts.{}.w2.weight", {experts, input, width}, &w2_);
}

at::Tensor MoeLayer::forward(const at::Tensor& x_ND, const SequenceLayout& layout,
                             const ForwardContext& context) const {
  check_shape("MoeLayer", "x_ND", x_ND, {-1, config_.hidden_size});
  const int64_t tokens = layout.num_tokens(), spare_rows = x_ND.size(0) - tokens;
  check_argument(spare_rows >= 0, "MoeLayer", "x_ND: fewer rows than the layout has tokens");
  const at::Tensor x_TD = spare_rows > 0 ? x_ND.narrow(0, 0, tokens) : x_ND;
  const RouteOutput route = route_tokens(x_TD, layout, context);

  const bool latent = config_.latent_size > 0;
  const at::Tensor z_TL = latent ? linear(x_TD, down_proj_, context.numerics) : x_TD;
  at::Tensor y_TD = moe_experts(z_TL, route.ids_NA, route.weights_NA, w1_, w3_, w2_, config_.activation);
  // The norm acts on the combined latent: a norm of the sum, not a sum of norms.
  if (latent && config_.latent_norm) y_TD = rms_norm(y_TD, norm_, config_.norm_eps);
  if (latent) y_TD = linear(y_TD, up_proj_, context.numerics);
  if (shared_) y_TD = y_TD + shared_->forward(x_TD, context);
  return spare_rows > 0 ? at::constant_pad_nd(y_TD, {0, 0, 0, spare_rows}) : y_TD;
}

RouteOutput MoeLayer::route_tokens(const at::Tensor& x_TD, const SequenceLayout& layout,
                                   const ForwardContext& context) const {
  std::optional<at::Tensor> forced;
  if (context.forced_expert_ids_NA.defined()) forced = context.forced_expert_ids_NA.narrow(0, 0, layout.num_tokens());
  // fp32 whatever the compute dtype: a bf16 product changes about one in twenty of the chosen sets.
  const at::Tensor wide = x_TD.scalar_type() == at::kDouble ? x_TD : x_TD.to(at::kFloat);
  const at::Tensor logits_TE = linear(wide, gate_, context.numerics);
  RouteOutput route = moe_route(logits_TE, correction_bias_, config_.route, forced);
  if (context.training && balancer_) {
    balancer_->observe(route.scores_NE, route.cutoff_N, correction_bias_, layout.num_tokens());
  }
  if (context.record != nullptr) {
    context.record->expert_ids_NA = route.ids_NA;
    context.record->margin_N = route.margin_N;
    context.record->load_E = index_counts(route.ids_NA, config_.num_experts);
  }
  return route;
}

void MoeLayer::enable_balancing(int64_t num_bins) {
  balancer_ = std::make_unique<QuantileBalancer>(config_.num_experts, config_.route.num_chosen, num_bins);
}

}  // namespace furlong
