#pragma once

// Causal depthwise convolution followed by SiLU.
//   N packed tokens   B sequences   S state slots   P channels   W kernel width   T = W - 1 tail columns
//
//   u[t, p] = sum_j w[p, j] x[t - W + 1 + j, p]        y = u sigmoid(u)
//
// x before a sequence's first token is the initial tail, or zero. Weights fp32, arithmetic fp32, y in x's dtype.
// The tail holds the last W - 1 inputs x (not outputs), newest last.

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "furlong/ops/common/sequence_layout.h"

namespace furlong {

/// Returns y_NP and the final tail_BTP (x's dtype). Differentiable in x, weight and the initial tail.
/// Schema furlong::short_conv.
std::tuple<at::Tensor, at::Tensor> short_conv(const at::Tensor& x_NP, const at::Tensor& weight_PW,
                                              const SequenceLayout& layout,
                                              const std::optional<at::Tensor>& initial_tail_BTP);

/// One token for each of B sequences; tails in the pool are updated in place. Refused under autograd.
/// Schema furlong::short_conv_step_.
at::Tensor short_conv_step_(const at::Tensor& x_BP, const at::Tensor& weight_PW, at::Tensor& tail_STP,
                            const at::Tensor& slots_B);

}  // namespace furlong
