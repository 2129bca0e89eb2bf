#include "furlong/ops/situ/reference.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"

namespace furlong {

at::Tensor situ_glu_reference(const at::Tensor& gate, const at::Tensor& up, double beta,
                              std::optional<double> linear_beta) {
  const at::Tensor gate_wide = gate.to(arithmetic_type(gate));
  const at::Tensor up_wide = up.to(arithmetic_type(gate));
  const at::Tensor linear = linear_beta ? up_wide.div(*linear_beta).tanh() * *linear_beta : up_wide;
  return (gate_wide.div(beta).tanh() * beta * gate_wide.sigmoid() * linear).to(gate.scalar_type());
}

at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor gate_wide = gate.to(arithmetic_type(gate));
  return (gate_wide * gate_wide.sigmoid() * up.to(arithmetic_type(gate))).to(gate.scalar_type());
}

}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("situ_glu_reference", furlong::situ_glu_reference);
  m.impl("swiglu_reference", furlong::swiglu_reference);
}
