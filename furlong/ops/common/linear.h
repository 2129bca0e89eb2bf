#pragma once

// The one door for every dense product of the model.
//
// Library products give a row other bits when the number of rows changes. In exact mode the product runs in blocks of
// kExactRows rows (the last block padded with zeros), so that a row's result depends on that row and its place in the
// block's shape alone, not on its neighbours.

#include <ATen/core/Tensor.h>

#include "furlong/ops/common/forward_context.h"

namespace furlong {

constexpr int64_t kExactRows = 64;

/// y_NO = x_NI weight_OI^T in x's dtype; the weight is cast to it if it differs (fp32 masters under bf16 compute, the
/// gradient returns in the weight's own dtype).
at::Tensor linear(const at::Tensor& x_NI, const at::Tensor& weight_OI, Numerics numerics);

}  // namespace furlong
