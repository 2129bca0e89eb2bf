#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "furlong/optim/optimizer.h"

namespace furlong {

/// One parameter's part in a step: four fp32, contiguous tensors of one shape. All but the gradient are changed in
/// place.
struct AdamWParam {
  at::Tensor weight;
  at::Tensor grad;
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  bool weight_decay = true;
};

/// `step` counts from one. The parameters may be spread over several devices.
void adamw_step(const std::vector<AdamWParam>& params, const AdamWConfig& config, double lr, int64_t step);

}  // namespace furlong
