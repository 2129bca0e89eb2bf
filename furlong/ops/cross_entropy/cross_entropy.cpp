#include "furlong/ops/cross_entropy/cross_entropy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/cross_entropy/checks.h"
#include "furlong/ops/cross_entropy/reference.h"

namespace furlong {

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy(const at::Tensor& hidden_ND, const at::Tensor& head_VD,
                                                        const at::Tensor& targets_N, const at::Tensor& token_weight_N) {
  static const auto op = find_op<decltype(linear_cross_entropy)>("furlong::linear_cross_entropy");
  return op.call(hidden_ND, head_VD, targets_N, token_weight_N);
}

namespace {

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy_meta(const at::Tensor& hidden_ND, const at::Tensor& head_VD,
                                                             const at::Tensor& targets_N,
                                                             const at::Tensor& token_weight_N) {
  check_linear_cross_entropy(hidden_ND, head_VD, targets_N, token_weight_N);
  const at::TensorOptions wide = hidden_ND.options().dtype(arithmetic_type(hidden_ND));
  return {at::empty({}, wide), at::empty_symint({hidden_ND.sym_size(0)}, wide)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> with_gradients_meta(const at::Tensor& hidden_ND,
                                                                               const at::Tensor& head_VD,
                                                                               const at::Tensor& targets_N,
                                                                               const at::Tensor& token_weight_N) {
  auto [loss, nll_N] = linear_cross_entropy_meta(hidden_ND, head_VD, targets_N, token_weight_N);
  return {loss, nll_N, at::empty_like(hidden_ND, at::MemoryFormat::Contiguous),
          at::empty_like(head_VD, at::MemoryFormat::Contiguous)};
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("linear_cross_entropy(Tensor hidden, Tensor head, Tensor targets, Tensor token_weight) -> (Tensor, Tensor)");
  m.def(
      "_linear_cross_entropy_with_gradients(Tensor hidden, Tensor head, Tensor targets, Tensor token_weight) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "linear_cross_entropy_reference(Tensor hidden, Tensor head, Tensor targets, Tensor token_weight) -> "
      "(Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("linear_cross_entropy", furlong::linear_cross_entropy_meta);
  m.impl("_linear_cross_entropy_with_gradients", furlong::with_gradients_meta);
}
