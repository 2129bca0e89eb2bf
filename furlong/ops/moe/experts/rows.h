#pragma once

// Row moves and sums of the expert pairs: everything of moe_experts that is no matrix product.
//   N tokens   A chosen   P places (pairs.h)   L input width   I expert width

#include <ATen/core/Tensor.h>

#include "furlong/ops/moe/experts/pairs.h"

namespace furlong::moe_experts_detail {

/// The row of each pair's token: [P, L] out of [N, L].
at::Tensor gather_rows(const at::Tensor& x_NL, const Pairs& pairs);

/// out_n = sum_a weights_na y_(place of pair na), summed in fp32 (fp64 for fp64) over a in order; weights undefined: 1.
at::Tensor combine_rows(const at::Tensor& y_PL, const at::Tensor& weights_NA, const Pairs& pairs, int64_t num_tokens);

/// For each pair p with weight w, from h and from g = d loss / d (w h) without its w:
///   grad_weight_p = <g_p, h_p>     weighted_hidden = w h     grad_hidden = w g (in place of g)
struct WeightedHidden {
  at::Tensor grad_weights_NA, weighted_hidden_PI;
};
WeightedHidden weigh_hidden(const at::Tensor& hidden_PI, at::Tensor& grad_PI, const at::Tensor& weights_NA,
                            const Pairs& pairs);

}  // namespace furlong::moe_experts_detail
