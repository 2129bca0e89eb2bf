#include "furlong/ops/attnres/reference.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"

namespace furlong {

std::tuple<at::Tensor, at::Tensor> attnres_read_reference(at::TensorList sources_ND, const at::Tensor& w_D,
                                                          double eps) {
  const at::Tensor& first = sources_ND[0];
  const at::Tensor v_NSD = at::stack(sources_ND, 1).to(arithmetic_type(first));
  const at::Tensor r_NS = (v_NSD * v_NSD).mean(-1).add(eps).rsqrt();
  const at::Tensor logit_NS = at::matmul(v_NSD, w_D.to(v_NSD.scalar_type())) * r_NS;
  const at::Tensor p_NS = logit_NS.softmax(-1);
  const at::Tensor out_ND = (p_NS.unsqueeze(-1) * v_NSD).sum(1);
  return {out_ND.to(first.scalar_type()), p_NS.detach()};
}

}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("attnres_read_reference", furlong::attnres_read_reference);
}
