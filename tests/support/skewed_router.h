#pragma once

// The toy router of the balance experiments: sigmoid scores of experts with unequal mean logits, fresh tokens every
// step, no learning. What a balancer can reach on it is known (furlong/ops/moe/route/README.md).

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "furlong/base/rng.h"
#include "furlong/ops/moe/route/balance.h"
#include "furlong/ops/moe/route/route.h"

namespace furlong {

struct SkewedRouter {
  int64_t num_experts, num_chosen, tokens;
  double skew;  // standard deviation of the experts' mean logits
  uint64_t seed;

  /// Logits of step `step`: a standard normal for each token and expert on top of the expert's mean.
  at::Tensor logits(int64_t step) const {
    at::Tensor logits_NE = at::empty({tokens, num_experts});
    Rng mean_rng(seed, 0), noise(seed, static_cast<uint64_t>(step) + 1);
    std::vector<float> mean(num_experts);
    for (float& value : mean) value = static_cast<float>(skew * mean_rng.normal());
    float* out = logits_NE.data_ptr<float>();
    for (int64_t i = 0; i < tokens * num_experts; ++i) {
      out[i] = mean[i % num_experts] + static_cast<float>(noise.normal());
    }
    return logits_NE;
  }

  RouteOutput route(int64_t step, const at::Tensor& bias_E) const {
    return moe_route(logits(step), bias_E, {.num_chosen = num_chosen}, std::nullopt);
  }
  at::Tensor load(const RouteOutput& out) const { return at::bincount(out.ids_NA.reshape(-1), {}, num_experts); }

  /// MaxVio that sampling alone causes, when thresholds are estimated from one batch and judged on another:
  /// sqrt(2 ln n) sqrt((1 - k/n) (1/q + 1/q)).
  double noise_floor() const {
    const double share = static_cast<double>(num_chosen) / static_cast<double>(num_experts);
    const double fair_load = static_cast<double>(tokens) * share;
    return std::sqrt(2 * std::log(static_cast<double>(num_experts))) * std::sqrt((1 - share) * 2 / fair_load);
  }
};

}  // namespace furlong
