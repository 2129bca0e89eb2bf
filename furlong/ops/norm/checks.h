#pragma once

// Argument checks of the norms, made by every backend.

#include <ATen/core/Tensor.h>

#include "furlong/base/shape.h"

namespace furlong {

inline void check_norm_input(const char* op, const at::Tensor& x) {
  check_argument(x.dim() >= 1, op, "x: got a scalar, need at least one dimension");
  check_argument(at::isFloatingType(x.scalar_type()), op,
                 std::string("x: got ") + c10::toString(x.scalar_type()) + ", need a floating-point dtype");
}

inline void check_rms_norm(const at::Tensor& x, const at::Tensor& weight_D) {
  check_norm_input("rms_norm", x);
  check_shape("rms_norm", "weight_D", weight_D, {x.size(-1)});
}

inline void check_gated_rms_norm(const at::Tensor& x, const at::Tensor& weight_V, const at::Tensor& gate) {
  check_norm_input("gated_rms_norm", x);
  check_shape("gated_rms_norm", "weight_V", weight_V, {x.size(-1)});
  check_argument(gate.sizes() == x.sizes(), "gated_rms_norm",
                 std::string("gate: got ") + shape_text(gate.sizes()) + ", need " + shape_text(x.sizes()));
  check_dtype("gated_rms_norm", "gate", gate, x.scalar_type());
}

inline void check_l2_norm(const at::Tensor& x) {
  check_norm_input("l2_norm", x);
}

}  // namespace furlong
