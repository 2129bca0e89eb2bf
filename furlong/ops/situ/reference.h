#pragma once

// The maths of situ.h in plain tensor operations: any device, fp64 included, differentiable by autograd. The oracle of
// the kernels, and what CUDA tensors run. Schemas furlong::*_reference.

#include <ATen/core/Tensor.h>

#include <optional>

namespace furlong {

at::Tensor situ_glu_reference(const at::Tensor& gate, const at::Tensor& up, double beta,
                              std::optional<double> linear_beta);
at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& up);

}  // namespace furlong
