#pragma once

// The mixture-of-experts feed-forward block: router on the full-width input, optional latent down-projection, routed
// experts, optional norm of the combined latent, up-projection, shared experts.
//   N tokens   D hidden   L latent   E experts   A chosen   I expert width

#include <memory>
#include <string>

#include "furlong/ops/common/forward_context.h"
#include "furlong/ops/common/param_spec.h"
#include "furlong/ops/common/sequence_layout.h"
#include "furlong/ops/moe/route/balance.h"
#include "furlong/ops/moe/route/route.h"
#include "furlong/ops/situ/layer.h"

namespace furlong {

struct MoeLayerConfig {
  int64_t hidden_size = 0;
  int64_t latent_size = 0;  // 0: experts work on the hidden size, no down / up projection
  bool latent_norm = false;
  int64_t expert_size = 0;
  int64_t num_experts = 0;
  int64_t num_shared_experts = 0;
  RouteConfig route = {};
  Activation activation = {};
  double norm_eps = 1e-5;
  double init_std = 0.02;
};

class MoeLayer {
 public:
  explicit MoeLayer(const MoeLayerConfig& config);

  /// Below `prefix` ("model.layers.1.block_sparse_moe."): gate.weight, gate.e_score_correction_bias,
  /// shared_experts.*, routed_expert_down_proj.weight, routed_expert_norm.weight, routed_expert_up_proj.weight,
  /// experts.{}.w1.weight, experts.{}.w3.weight, experts.{}.w2.weight (stacked).
  void declare(ParamList& list, const std::string& prefix);
  /// In a training forward the balance histogram counts the layout's tokens.
  at::Tensor forward(const at::Tensor& x_ND, const SequenceLayout& layout, const ForwardContext& context) const;

  /// Turns counting on (training). Without it forward never counts.
  void enable_balancing(int64_t num_bins);
  /// The balancer, or null.
  QuantileBalancer* balancer() const { return balancer_.get(); }
  at::Tensor& correction_bias_E() { return correction_bias_; }

 private:
  RouteOutput route_tokens(const at::Tensor& x_TD, const SequenceLayout& layout, const ForwardContext& context) const;

  MoeLayerConfig config_;
  at::Tensor gate_, correction_bias_;      // [E, D], [E]; fp32
  at::Tensor down_proj_, norm_, up_proj_;  // [L, D], [L], [D, L]
  at::Tensor w1_, w3_, w2_;                // [E, I, L], [E, I, L], [E, L, I]
  std::unique_ptr<GluMlp> shared_;
  std::unique_ptr<QuantileBalancer> balancer_;
};

}  // namespace furlong
