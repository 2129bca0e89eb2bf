#pragma once

// The dense gated MLP: down(act(gate x, up x)). Also the shared experts, fused into one MLP of n times the width.
//   N tokens   D hidden   I intermediate

#include <string>

#include "furlong/ops/common/forward_context.h"
#include "furlong/ops/common/param_spec.h"
#include "furlong/ops/situ/situ.h"

namespace furlong {

struct GluMlpConfig {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  Activation activation = {};
  double init_std = 0.02;
};

class GluMlp {
 public:
  explicit GluMlp(const GluMlpConfig& config) : config_(config) {}
  /// gate_proj.weight, up_proj.weight, down_proj.weight below `prefix`.
  void declare(ParamList& list, const std::string& prefix);
  at::Tensor forward(const at::Tensor& x_ND, const ForwardContext& context) const;

 private:
  GluMlpConfig config_;
  at::Tensor gate_proj_, up_proj_, down_proj_;  // [I, D], [I, D], [D, I]
};

}  // namespace furlong
