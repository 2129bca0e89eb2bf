#include "furlong/ops/cross_entropy/reference.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"

namespace furlong {

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy_reference(const at::Tensor& hidden_ND,
                                                                  const at::Tensor& head_VD,
                                                                  const at::Tensor& targets_N,
                                                                  const at::Tensor& token_weight_N) {
  const at::ScalarType wide = arithmetic_type(hidden_ND);
  const at::Tensor counted_N = token_weight_N != 0;
  // An ignored row may hold anything, a NaN included: it must not reach a product, whose gradient would be 0 * NaN.
  const at::Tensor hidden = at::where(counted_N.unsqueeze(1), hidden_ND, 0.0).to(hidden_ND.scalar_type());
  const at::Tensor target_N = at::where(counted_N, targets_N, 0);
  const at::Tensor logits_NV = at::linear(hidden, head_VD.to(hidden_ND.scalar_type())).to(wide);
  const at::Tensor log_p_N = logits_NV.log_softmax(-1).gather(1, target_N.unsqueeze(1)).squeeze(1);
  const at::Tensor nll_N = at::where(counted_N, -log_p_N, 0.0);
  return {(nll_N * token_weight_N.to(wide)).sum(), nll_N.detach()};
}

}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy_reference", furlong::linear_cross_entropy_reference);
}
