#include "furlong/ops/common/linear.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/split.h>

#include "furlong/base/shape.h"

namespace furlong {

at::Tensor linear(const at::Tensor& x_NI, const at::Tensor& weight_OI, Numerics numerics) {
  check_shape("linear", "weight_OI", weight_OI, {-1, x_NI.size(-1)});
  const at::Tensor weight =
      weight_OI.scalar_type() == x_NI.scalar_type() ? weight_OI : weight_OI.to(x_NI.scalar_type());
  if (numerics == Numerics::kFast || x_NI.size(0) == 0) return at::linear(x_NI, weight);
  const int64_t rows = x_NI.size(0);
  const int64_t padding = (kExactRows - rows % kExactRows) % kExactRows;
  const at::Tensor padded = padding > 0 ? at::constant_pad_nd(x_NI, {0, 0, 0, padding}) : x_NI;
  std::vector<at::Tensor> blocks;
  for (const at::Tensor& block : at::split(padded, kExactRows)) blocks.push_back(at::linear(block, weight));
  const at::Tensor y = at::cat(blocks);
  return padding > 0 ? y.slice(0, 0, rows) : y;
}

}  // namespace furlong
