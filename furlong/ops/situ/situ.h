#pragma once

// Gated activations of the feed-forward layers. Arithmetic fp32, one cast at the end.

#include <ATen/core/Tensor.h>

#include <optional>

namespace furlong {

/// SiTU-GLU: [beta tanh(gate / beta) sigmoid(gate)] * [linear_beta tanh(up / linear_beta)]; without linear_beta `up` is
/// taken as is. |result| <= beta * linear_beta. gate, up [..., I]. Schema furlong::situ_glu.
at::Tensor situ_glu(const at::Tensor& gate, const at::Tensor& up, double beta, std::optional<double> linear_beta);

/// SwiGLU: silu(gate) * up. Schema furlong::swiglu.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// Which of the two, with its constants: what layers carry.
struct Activation {
  enum class Kind { kSitu, kSwiglu };
  Kind kind = Kind::kSwiglu;
  double beta = 1.0;
  std::optional<double> linear_beta = {};

  at::Tensor operator()(const at::Tensor& gate, const at::Tensor& up) const {
    return kind == Kind::kSitu ? situ_glu(gate, up, beta, linear_beta) : swiglu(gate, up);
  }
};

}  // namespace furlong
