#pragma once

// The router: sigmoid scores, biased selection, unbiased weights.
//   N tokens   E experts   A experts chosen for a token (k of the literature)
//
//   s = sigmoid(logits)     choice = s + bias      ids = top-A(choice), ties to the lowest index
//   w = s[ids]              w /= sum w + 1e-20 if renormalize and A > 1        w *= scale
// With groups: a group's score is the sum of its two best choices; only the best groups_kept groups are eligible.
// The bias selects and never weighs; no gradient reaches it. All fp32.

#include <ATen/core/Tensor.h>

#include <optional>

namespace furlong {

struct RouteConfig {
  int64_t num_chosen = 1;
  int64_t num_groups = 1;
  int64_t groups_kept = 1;
  bool renormalize = true;
  double scale = 1.0;
};

struct RouteOutput {
  at::Tensor ids_NA;      // int64, best first
  at::Tensor weights_NA;  // fp32, differentiable in the logits
  at::Tensor scores_NE;   // fp32 sigmoid scores, not differentiable
  at::Tensor cutoff_N;    // fp32, the (A+1)-th best biased score (A = E: the lowest one)
  at::Tensor margin_N;    // fp32, A-th minus (A+1)-th biased score
};

/// `forced_ids_NA`: route to these experts instead (replay); weights and their gradients come from the gathered scores.
/// Schema furlong::moe_route.
RouteOutput moe_route(const at::Tensor& logits_NE, const at::Tensor& bias_E, const RouteConfig& config,
                      const std::optional<at::Tensor>& forced_ids_NA);

}  // namespace furlong
