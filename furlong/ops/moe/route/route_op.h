#pragma once

// Pieces of moe_route that its backends share.

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "furlong/ops/moe/route/route.h"

namespace furlong::moe_route_detail {

constexpr double kWeightSumEpsilon = 1e-20;

/// ids, weights, scores, cutoff, margin.
using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

void check(const at::Tensor& logits_NE, const at::Tensor& bias_E, const RouteConfig& config,
           const std::optional<at::Tensor>& forced_ids_NA);

}  // namespace furlong::moe_route_detail
