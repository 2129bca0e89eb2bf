#pragma once

// Output projection and cross entropy in one op, chunked over tokens: the logits of the whole batch never exist at
// once.
//   N tokens   D hidden   V vocabulary

#include <ATen/core/Tensor.h>

#include <tuple>

namespace furlong {

/// loss = sum_n weight_n * nll_n, a scalar fp32, differentiable in hidden and the head's weight; and nll_N, fp32, the
/// negative log-likelihood in nats of each token (0 where weight is 0, not differentiable).
/// hidden_ND fp32 or bf16; head_VD is cast to hidden's dtype; targets_N int64, ignored where token_weight_N (fp32) is
/// 0. logits are accumulated and normalised in fp32. Schema furlong::linear_cross_entropy.
std::tuple<at::Tensor, at::Tensor> linear_cross_entropy(const at::Tensor& hidden_ND, const at::Tensor& head_VD,
                                                        const at::Tensor& targets_N, const at::Tensor& token_weight_N);

}  // namespace furlong
