#pragma once

// Argument checks of the read, made by every backend.

#include <ATen/core/Tensor.h>

#include "furlong/base/shape.h"

namespace furlong {

inline void check_attnres_read(at::TensorList sources_ND, const at::Tensor& w_D) {
  constexpr const char* kOp = "attnres_read";
  check_argument(!sources_ND.empty(), kOp, "sources_ND: got none, need at least one");
  const at::Tensor& first = sources_ND[0];
  check_shape(kOp, "sources_ND", first, {-1, -1});
  check_argument(
      at::isFloatingType(first.scalar_type()), kOp,
      std::string("sources_ND: got ") + c10::toString(first.scalar_type()) + ", need a floating-point dtype");
  for (const at::Tensor& source : sources_ND) {
    check_shape(kOp, "sources_ND", source, {first.size(0), first.size(1)});
    check_dtype(kOp, "sources_ND", source, first.scalar_type());
  }
  check_shape(kOp, "w_D", w_D, {first.size(1)});
}

}  // namespace furlong
