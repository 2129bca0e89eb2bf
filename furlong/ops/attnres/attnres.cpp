#include "furlong/ops/attnres/attnres.h"

#include <torch/library.h>

#include "furlong/ops/attnres/reference.h"
#include "furlong/ops/common/kernel.h"

namespace furlong {

std::tuple<at::Tensor, at::Tensor> attnres_read(at::TensorList sources_ND, const at::Tensor& w_D, double eps) {
  static const auto op = find_op<decltype(attnres_read)>("furlong::attnres_read");
  return op.call(sources_ND, w_D, eps);
}

}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("attnres_read(Tensor[] sources, Tensor w, float eps) -> (Tensor, Tensor)");
  m.def("attnres_read_reference(Tensor[] sources, Tensor w, float eps) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("attnres_read", furlong::attnres_read_reference);
}
