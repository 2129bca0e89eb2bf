#pragma once

// The maths of attnres.h in plain tensor operations: any device, fp64 included, differentiable by autograd. The oracle
// of the kernel, and what CUDA tensors run. Schema furlong::attnres_read_reference.

#include <ATen/core/Tensor.h>

#include <tuple>

namespace furlong {

std::tuple<at::Tensor, at::Tensor> attnres_read_reference(at::TensorList sources_ND, const at::Tensor& w_D, double eps);

}  // namespace furlong
