#include "furlong/ops/norm/norm.h"

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/norm/checks.h"
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

namespace {

at::Tensor empty_rows(const at::Tensor& x) {
  return at::empty_like(x, at::MemoryFormat::Contiguous);
}

at::Tensor rms_norm_meta(const at::Tensor& x, const at::Tensor& weight_D, double) {
  check_rms_norm(x, weight_D);
  return empty_rows(x);
}

at::Tensor gated_rms_norm_meta(const at::Tensor& x, const at::Tensor& weight_V, const at::Tensor& gate, double) {
  check_gated_rms_norm(x, weight_V, gate);
  return empty_rows(x);
}

at::Tensor l2_norm_meta(const at::Tensor& x, double) {
  check_l2_norm(x);
  return empty_rows(x);
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward_meta(const at::Tensor&, const at::Tensor& x,
                                                          const at::Tensor& weight_D, double) {
  return {empty_rows(x), empty_rows(weight_D)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_rms_norm_backward_meta(const at::Tensor&, const at::Tensor& x,
                                                                            const at::Tensor& weight_V,
                                                                            const at::Tensor& gate, double) {
  return {empty_rows(x), empty_rows(weight_V), empty_rows(gate)};
}

at::Tensor l2_norm_backward_meta(const at::Tensor&, const at::Tensor& x, double) {
  return empty_rows(x);
}

// CUDA tensors run the reference; gradients come from its tensor operations, so there is no backward op here.

at::Tensor rms_norm_cuda(const at::Tensor& x, const at::Tensor& weight_D, double eps) {
  check_rms_norm(x, weight_D);
  return rms_norm_reference(x, weight_D, eps);
}

at::Tensor gated_rms_norm_cuda(const at::Tensor& x, const at::Tensor& weight_V, const at::Tensor& gate, double eps) {
  check_gated_rms_norm(x, weight_V, gate);
  return gated_rms_norm_reference(x, weight_V, gate, eps);
}

at::Tensor l2_norm_cuda(const at::Tensor& x, double eps) {
  check_l2_norm(x);
  return l2_norm_reference(x, eps);
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("gated_rms_norm(Tensor x, Tensor weight, Tensor gate, float eps) -> Tensor");
  m.def("l2_norm(Tensor x, float eps=1e-6) -> Tensor");
  m.def("_rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def(
      "_gated_rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor gate, float eps) -> "
      "(Tensor, Tensor, Tensor)");
  m.def("_l2_norm_backward(Tensor grad, Tensor x, float eps) -> Tensor");
  m.def("rms_norm_reference(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("gated_rms_norm_reference(Tensor x, Tensor weight, Tensor gate, float eps) -> Tensor");
  m.def("l2_norm_reference(Tensor x, float eps=1e-6) -> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("rms_norm", furlong::rms_norm_meta);
  m.impl("gated_rms_norm", furlong::gated_rms_norm_meta);
  m.impl("l2_norm", furlong::l2_norm_meta);
  m.impl("_rms_norm_backward", furlong::rms_norm_backward_meta);
  m.impl("_gated_rms_norm_backward", furlong::gated_rms_norm_backward_meta);
  m.impl("_l2_norm_backward", furlong::l2_norm_backward_meta);
}

TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("rms_norm", furlong::rms_norm_cuda);
  m.impl("gated_rms_norm", furlong::gated_rms_norm_cuda);
  m.impl("l2_norm", furlong::l2_norm_cuda);
}
