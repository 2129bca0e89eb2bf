#pragma once

// Attention residuals: a read over depth. Each token mixes S sources (sealed block sums and the running prefix) by a
// softmax over their RMS-normalised match with one learned vector; tokens never mix.
//   N tokens   D hidden   S sources
//
//   r_s = rsqrt(mean_d v_s^2 + eps)    l_s = sum_d v_sd r_s w_d      (w = norm weight * projection weight, fp32)
//   p   = softmax_s(l)                 out = sum_s p_s v_s           (raw v)
//
// Arithmetic fp32, one cast to the sources' dtype. One source: the identity.

#include <ATen/core/Tensor.h>

#include <tuple>

namespace furlong {

/// Returns out_ND and the weights p_NS (fp32, not differentiable). Differentiable in the sources and w.
/// Schema furlong::attnres_read.
std::tuple<at::Tensor, at::Tensor> attnres_read(at::TensorList sources_ND, const at::Tensor& w_D, double eps);

}  // namespace furlong
