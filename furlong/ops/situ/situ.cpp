#include "furlong/ops/situ/situ.h"

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/situ/checks.h"
#include "furlong/ops/situ/reference.h"

namespace furlong {

at::Tensor situ_glu(const at::Tensor& gate, const at::Tensor& up, double beta, std::optional<double> linear_beta) {
  static const auto op = find_op<decltype(situ_glu)>("furlong::situ_glu");
  return op.call(gate, up, beta, linear_beta);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  static const auto op = find_op<decltype(swiglu)>("furlong::swiglu");
  return op.call(gate, up);
}

namespace {

at::Tensor empty_dense(const at::Tensor& tensor) {
  return at::empty_like(tensor, at::MemoryFormat::Contiguous);
}

at::Tensor situ_glu_meta(const at::Tensor& gate, const at::Tensor& up, double beta, std::optional<double> linear_beta) {
  check_situ_glu(gate, up, beta, linear_beta);
  return empty_dense(gate);
}

at::Tensor swiglu_meta(const at::Tensor& gate, const at::Tensor& up) {
  check_swiglu(gate, up);
  return empty_dense(gate);
}

std::tuple<at::Tensor, at::Tensor> situ_glu_backward_meta(const at::Tensor&, const at::Tensor& gate,
                                                          const at::Tensor& up, double, std::optional<double>) {
  return {empty_dense(gate), empty_dense(up)};
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward_meta(const at::Tensor&, const at::Tensor& gate,
                                                        const at::Tensor& up) {
  return {empty_dense(gate), empty_dense(up)};
}

// CUDA tensors run the reference; gradients come from its tensor operations, so there is no backward op here.

at::Tensor situ_glu_cuda(const at::Tensor& gate, const at::Tensor& up, double beta, std::optional<double> linear_beta) {
  check_situ_glu(gate, up, beta, linear_beta);
  return situ_glu_reference(gate, up, beta, linear_beta);
}

at::Tensor swiglu_cuda(const at::Tensor& gate, const at::Tensor& up) {
  check_swiglu(gate, up);
  return swiglu_reference(gate, up);
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("situ_glu(Tensor gate, Tensor up, float beta, float? linear_beta) -> Tensor");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("_situ_glu_backward(Tensor grad, Tensor gate, Tensor up, float beta, float? linear_beta) -> (Tensor, Tensor)");
  m.def("_swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  m.def("situ_glu_reference(Tensor gate, Tensor up, float beta, float? linear_beta) -> Tensor");
  m.def("swiglu_reference(Tensor gate, Tensor up) -> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("situ_glu", furlong::situ_glu_meta);
  m.impl("swiglu", furlong::swiglu_meta);
  m.impl("_situ_glu_backward", furlong::situ_glu_backward_meta);
  m.impl("_swiglu_backward", furlong::swiglu_backward_meta);
}

TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("situ_glu", furlong::situ_glu_cuda);
  m.impl("swiglu", furlong::swiglu_cuda);
}
