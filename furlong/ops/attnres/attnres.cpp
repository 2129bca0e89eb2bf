#include "furlong/ops/attnres/attnres.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "furlong/ops/attnres/checks.h"
#include "furlong/ops/attnres/reference.h"
#include "furlong/ops/common/kernel.h"

namespace furlong {

std::tuple<at::Tensor, at::Tensor> attnres_read(at::TensorList sources_ND, const at::Tensor& w_D, double eps) {
  static const auto op = find_op<decltype(attnres_read)>("furlong::attnres_read");
  return op.call(sources_ND, w_D, eps);
}

namespace {

at::Tensor empty_dense(const at::Tensor& tensor) {
  return at::empty_like(tensor, at::MemoryFormat::Contiguous);
}

std::tuple<at::Tensor, at::Tensor> attnres_read_meta(at::TensorList sources_ND, const at::Tensor& w_D, double) {
  check_attnres_read(sources_ND, w_D);
  const at::Tensor& first = sources_ND[0];
  const at::Tensor p_NS = at::empty_symint({first.sym_size(0), static_cast<int64_t>(sources_ND.size())},
                                           first.options().dtype(arithmetic_type(first)));
  return {empty_dense(first), p_NS};
}

std::tuple<std::vector<at::Tensor>, at::Tensor> attnres_read_backward_meta(const at::Tensor&, at::TensorList sources_ND,
                                                                           const at::Tensor& w_D, double) {
  std::vector<at::Tensor> dsources_ND;
  for (const at::Tensor& source : sources_ND) dsources_ND.push_back(empty_dense(source));
  return {std::move(dsources_ND), empty_dense(w_D)};
}

// CUDA tensors run the reference; gradients come from its tensor operations, so there is no backward op here.
std::tuple<at::Tensor, at::Tensor> attnres_read_cuda(at::TensorList sources_ND, const at::Tensor& w_D, double eps) {
  check_attnres_read(sources_ND, w_D);
  return attnres_read_reference(sources_ND, w_D, eps);
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("attnres_read(Tensor[] sources, Tensor w, float eps) -> (Tensor, Tensor)");
  m.def("_attnres_read_backward(Tensor grad, Tensor[] sources, Tensor w, float eps) -> (Tensor[], Tensor)");
  m.def("attnres_read_reference(Tensor[] sources, Tensor w, float eps) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("attnres_read", furlong::attnres_read_meta);
  m.impl("_attnres_read_backward", furlong::attnres_read_backward_meta);
}

TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("attnres_read", furlong::attnres_read_cuda);
}
