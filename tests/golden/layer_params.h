#pragma once

// Parameters of a layer out of a golden case, and its gradients against the expected ones.

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <string>
#include <vector>

#include "furlong/ops/common/param_spec.h"
#include "tests/support/golden.h"

namespace furlong::golden {

/// The case's tensors of one parameter: one, or one for each index of a stacked parameter, stacked.
inline at::Tensor find_param(const Case& test, const std::string& prefix, const ParamSpec& spec) {
  if (!spec.stacked()) return test.f32(prefix + spec.name);
  std::vector<at::Tensor> parts;
  for (int64_t i = 0; i < spec.shape[0]; ++i) {
    std::string name = spec.name;
    parts.push_back(test.f32(prefix + name.replace(name.find("{}"), 2, std::to_string(i))));
  }
  return at::stack(parts);
}

/// Sets every parameter from "param.NAME", as fp32 with a gradient where it is trained.
inline void load_params(const Case& test, const ParamList& list) {
  for (const Param& param : list.params()) {
    *param.tensor = find_param(test, "param.", param.spec).detach().clone();
    param.tensor->set_requires_grad(param.spec.rule != OptimizerRule::kFrozen);
  }
}

/// Compares every trained parameter's gradient with "out.d_param.NAME".
inline void expect_param_gradients(Case& test, const ParamList& list, double tolerance) {
  for (const Param& param : list.params()) {
    if (param.spec.rule == OptimizerRule::kFrozen) continue;
    test.expect_close("d " + param.spec.name, param.tensor->grad(), find_param(test, "out.d_param.", param.spec),
                      tolerance);
  }
}

}  // namespace furlong::golden
