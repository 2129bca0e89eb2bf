#include "furlong/ops/cross_entropy/cross_entropy.h"

#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/cross_entropy/reference.h"

namespace furlong {

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy(const at::Tensor& hidden_ND, const at::Tensor& head_VD,
                                                        const at::Tensor& targets_N, const at::Tensor& token_weight_N) {
  static const auto op = find_op<decltype(linear_cross_entropy)>("furlong::linear_cross_entropy");
  return op.call(hidden_ND, head_VD, targets_N, token_weight_N);
}

}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("linear_cross_entropy(Tensor hidden, Tensor head, Tensor targets, Tensor token_weight) -> (Tensor, Tensor)");
  m.def(
      "linear_cross_entropy_reference(Tensor hidden, Tensor head, Tensor targets, Tensor token_weight) -> "
      "(Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy", furlong::linear_cross_entropy_reference);
}
