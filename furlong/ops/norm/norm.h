#pragma once

// Normalisations over the last dimension. Arithmetic fp32 (fp64 for fp64 inputs), results in x's dtype.

#include <ATen/core/Tensor.h>

namespace furlong {

/// y = cast(x rsqrt(mean x^2 + eps)) * weight: the normalised value is rounded to x's dtype before the weight is
/// applied, as the released models do. x [..., D], weight [D]. Schema furlong::rms_norm.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_D, double eps);

/// y = x rsqrt(mean x^2 + eps) * weight * sigmoid(gate), all in fp32, one cast at the end. x, gate [..., V], weight
/// [V]. Schema furlong::gated_rms_norm.
at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& weight_V, const at::Tensor& gate, double eps);

/// y = x / sqrt(sum x^2 + eps): eps inside the root, on the sum. x [..., K]. Schema furlong::l2_norm.
at::Tensor l2_norm(const at::Tensor& x, double eps = 1e-6);

}  // namespace furlong
