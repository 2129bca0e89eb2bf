#pragma once

// Argument checks of the loss, made by every backend.

#include <ATen/core/Tensor.h>

#include "furlong/base/shape.h"

namespace furlong {

inline void check_linear_cross_entropy(const at::Tensor& hidden_ND, const at::Tensor& head_VD,
                                       const at::Tensor& targets_N, const at::Tensor& token_weight_N) {
  constexpr const char* kOp = "linear_cross_entropy";
  check_shape(kOp, "hidden_ND", hidden_ND, {-1, -1});
  check_argument(
      at::isFloatingType(hidden_ND.scalar_type()), kOp,
      std::string("hidden_ND: got ") + c10::toString(hidden_ND.scalar_type()) + ", need a floating-point dtype");
  check_shape(kOp, "head_VD", head_VD, {-1, hidden_ND.size(1)});
  check_shape(kOp, "targets_N", targets_N, {hidden_ND.size(0)});
  check_dtype(kOp, "targets_N", targets_N, at::kLong);
  check_shape(kOp, "token_weight_N", token_weight_N, {hidden_ND.size(0)});
  check_argument(at::isFloatingType(token_weight_N.scalar_type()), kOp,
                 std::string("token_weight_N: got ") + c10::toString(token_weight_N.scalar_type()) +
                     ", need a floating-point dtype");
}

}  // namespace furlong
