#include "furlong/ops/situ/situ.h"

#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
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

}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("situ_glu(Tensor gate, Tensor up, float beta, float? linear_beta) -> Tensor");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("situ_glu_reference(Tensor gate, Tensor up, float beta, float? linear_beta) -> Tensor");
  m.def("swiglu_reference(Tensor gate, Tensor up) -> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("situ_glu", furlong::situ_glu_reference);
  m.impl("swiglu", furlong::swiglu_reference);
}
