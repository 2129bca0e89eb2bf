#pragma once

// Comparison of an op with its oracle: values, gradients, and the oracle's gradients with finite differences.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

namespace furlong::testing {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

/// max|got - expected| / max|expected|, in fp64; infinite where shapes differ or something is not finite.
inline double relative_error(const at::Tensor& got, const at::Tensor& expected) {
  if (!got.defined() || !expected.defined() || got.sizes() != expected.sizes()) {
    return std::numeric_limits<double>::infinity();
  }
  if (got.numel() == 0) return 0.0;
  const at::Tensor wide = expected.detach().to(at::kDouble);
  const double error = (got.detach().to(at::kDouble) - wide).abs().max().item<double>();
  const double scale = wide.abs().max().item<double>();
  if (!(error <= std::numeric_limits<double>::max())) return std::numeric_limits<double>::infinity();
  return scale > 0.0 ? error / scale : error;
}

/// Gradients of sum(function(inputs) * cotangent) in every input. Integer inputs stay as they are;
/// their entry is undefined.
inline Tensors gradients(const Function& function, const Tensors& inputs, const at::Tensor& cotangent) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) {
    at::Tensor leaf = input.detach().clone();
    leaves.push_back(at::isFloatingType(leaf.scalar_type()) ? leaf.requires_grad_() : leaf);
  }
  const at::Tensor result = function(leaves);
  result.backward(cotangent.to(result.scalar_type()));
  Tensors grads;
  for (const at::Tensor& leaf : leaves) grads.push_back(leaf.grad());
  return grads;
}

inline Tensors to_dtype(const Tensors& tensors, at::ScalarType dtype) {
  Tensors cast;
  for (const at::Tensor& tensor : tensors) {
    cast.push_back(at::isFloatingType(tensor.scalar_type()) ? tensor.to(dtype) : tensor);
  }
  return cast;
}

/// Largest relative_error between autograd and central differences over the fp64 inputs.
inline double finite_difference_error(const Function& function, const Tensors& inputs, const at::Tensor& cotangent) {
  constexpr double kStep = 1e-5;  // error of second order ~1e-10, of rounding ~1e-11
  const Tensors grads = gradients(function, inputs, cotangent);
  const at::NoGradGuard no_grad;
  double worst = 0.0;
  for (size_t which = 0; which < inputs.size(); ++which) {
    if (!at::isFloatingType(inputs[which].scalar_type())) continue;
    Tensors moved = inputs;
    moved[which] = inputs[which].clone();
    at::Tensor flat = moved[which].view({-1});
    at::Tensor numeric = at::zeros_like(flat);
    for (int64_t i = 0; i < flat.numel(); ++i) {
      const double original = flat[i].item<double>();
      flat[i] = original + kStep;
      const double above = (function(moved) * cotangent).sum().item<double>();
      flat[i] = original - kStep;
      const double below = (function(moved) * cotangent).sum().item<double>();
      flat[i] = original;
      numeric[i] = (above - below) / (2 * kStep);
    }
    worst = std::max(worst, relative_error(grads[which].view({-1}), numeric));
  }
  return worst;
}

}  // namespace furlong::testing

/// The metric of tolerance.h.
#define EXPECT_CLOSE(got, expected, tolerance) EXPECT_LE(::furlong::testing::relative_error(got, expected), tolerance)
