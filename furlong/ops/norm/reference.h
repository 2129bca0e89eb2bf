#pragma once

// The maths of norm.h in plain tensor operations: any device, fp64 included, differentiable by autograd. The oracle of
// the kernels, and what CUDA tensors run. Schemas furlong::*_reference.

#include <ATen/core/Tensor.h>

namespace furlong {

at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight_D, double eps);
at::Tensor gated_rms_norm_reference(const at::Tensor& x, const at::Tensor& weight_V, const at::Tensor& gate,
                                    double eps);
at::Tensor l2_norm_reference(const at::Tensor& x, double eps);

}  // namespace furlong
