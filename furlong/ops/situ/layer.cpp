#include "furlong/ops/situ/layer.h"

#include "furlong/ops/common/linear.h"

namespace furlong {

void GluMlp::declare(ParamList& list, const std::string& prefix) {
  const auto matrix = [&](const char* name, int64_t rows, int64_t columns, at::Tensor* tensor) {
    list.add(
        prefix,
        {.name = name, .shape = {rows, columns}, .rule = OptimizerRule::kMuon, .init = Init::normal(config_.init_std)},
        tensor);
  };
  matrix("gate_proj.weight", config_.intermediate_size, config_.hidden_size, &gate_proj_);
  matrix("up_proj.weight", config_.intermediate_size, config_.hidden_size, &up_proj_);
  matrix("down_proj.weight", config_.hidden_size, config_.intermediate_size, &down_proj_);
}

at::Tensor GluMlp::forward(const at::Tensor& x_ND, const ForwardContext& context) const {
  const at::Tensor gate_NI = linear(x_ND, gate_proj_, context.numerics);
  const at::Tensor up_NI = linear(x_ND, up_proj_, context.numerics);
  return linear(config_.activation(gate_NI, up_NI), down_proj_, context.numerics);
}

}  // namespace furlong
