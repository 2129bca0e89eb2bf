#include "furlong/ops/norm/norm.h"

#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/norm/reference.h"

namespace furlong {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_D, double eps) {
  static const auto op = find_op<decltype(rms_norm)>("furlong::rms_norm");
  return op.call(x, weight_D, eps);
}

at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& weight_V, const at::Tensor& gate, double eps) {
  static const auto op = find_op<decltype(gated_rms_norm)>("furlong::gated_rms_norm");
  return op.call(x, weight_V, gate, eps);
}

at::Tensor l2_norm(const at::Tensor& x, double eps) {
  static const auto op = find_op<decltype(l2_norm)>("furlong::l2_norm");
  return op.call(x, eps);
}

}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("gated_rms_norm(Tensor x, Tensor weight, Tensor gate, float eps) -> Tensor");
  m.def("l2_norm(Tensor x, float eps=1e-6) -> Tensor");
  m.def("rms_norm_reference(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("gated_rms_norm_reference(Tensor x, Tensor weight, Tensor gate, float eps) -> Tensor");
  m.def("l2_norm_reference(Tensor x, float eps=1e-6) -> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("rms_norm", furlong::rms_norm_reference);
  m.impl("gated_rms_norm", furlong::gated_rms_norm_reference);
  m.impl("l2_norm", furlong::l2_norm_reference);
}
