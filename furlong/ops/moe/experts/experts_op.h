#pragma once

// Pieces of moe_experts that its backends share.
//   N tokens   A chosen   E experts   P = N A (token, expert) pairs, sorted by expert   L input width   I expert width

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "furlong/ops/situ/situ.h"

namespace furlong::moe_experts_detail {

void check(const at::Tensor& z_NL, const at::Tensor& ids_NA, const at::Tensor& weights_NA, const at::Tensor& w1_EIL,
           const at::Tensor& w3_EIL, const at::Tensor& w2_ELI);

/// The activation as a schema carries it: "situ" or "swiglu", beta, linear_beta.
std::string activation_name(const Activation& activation);
Activation make_activation(c10::string_view name, double beta, std::optional<double> linear_beta);

}  // namespace furlong::moe_experts_detail
