#pragma once

// The maths of cross_entropy.h with the whole matrix of logits: any device, fp64 included, differentiable by autograd.
// Schema furlong::linear_cross_entropy_reference.

#include <ATen/core/Tensor.h>

#include <tuple>

namespace furlong {

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy_reference(const at::Tensor& hidden_ND,
                                                                  const at::Tensor& head_VD,
                                                                  const at::Tensor& targets_N,
                                                                  const at::Tensor& token_weight_N);

}  // namespace furlong
