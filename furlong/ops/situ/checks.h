#pragma once

// Argument checks of the gated activations, made by every backend.

#include <ATen/core/Tensor.h>

#include <optional>

#include "furlong/base/shape.h"

namespace furlong {

inline void check_glu(const char* op, const at::Tensor& gate, const at::Tensor& up) {
  check_argument(at::isFloatingType(gate.scalar_type()), op,
                 std::string("gate: got ") + c10::toString(gate.scalar_type()) + ", need a floating-point dtype");
  check_argument(up.sizes() == gate.sizes(), op,
                 std::string("up: got ") + shape_text(up.sizes()) + ", need " + shape_text(gate.sizes()));
  check_dtype(op, "up", up, gate.scalar_type());
}

inline void check_situ_glu(const at::Tensor& gate, const at::Tensor& up, double beta,
                           std::optional<double> linear_beta) {
  check_glu("situ_glu", gate, up);
  check_argument(beta > 0, "situ_glu", std::string("beta: got ") + std::to_string(beta) + ", need more than 0");
  check_argument(!linear_beta || *linear_beta > 0, "situ_glu",
                 std::string("linear_beta: got ") + std::to_string(linear_beta.value_or(0)) + ", need more than 0");
}

inline void check_swiglu(const at::Tensor& gate, const at::Tensor& up) {
  check_glu("swiglu", gate, up);
}

}  // namespace furlong
