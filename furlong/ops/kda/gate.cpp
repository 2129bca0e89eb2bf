// The decay gates: schemas, checks and tensor-operation forms.
//   N packed tokens   H heads   K key size

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softplus.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/kda/internal.h"
#include "furlong/ops/kda/kda.h"

namespace furlong {

namespace {

void check_gate(const char* op, const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK) {
  check_shape(op, "z_NHK", z_NHK, {-1, -1, -1});
  check_shape(op, "a_log_H", a_log_H, {z_NHK.size(1)});
  check_shape(op, "dt_bias_HK", dt_bias_HK, {z_NHK.size(1), z_NHK.size(2)});
  const at::ScalarType work = z_NHK.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  check_dtype(op, "a_log_H", a_log_H, work);
  check_dtype(op, "dt_bias_HK", dt_bias_HK, work);
}

/// z + dt_bias in the parameters' precision: the bias is added before the multiplication by exp(a_log).
at::Tensor biased(const at::Tensor& z_NHK, const at::Tensor& dt_bias_HK) {
  return z_NHK.to(dt_bias_HK.scalar_type()) + dt_bias_HK;
}

}  // namespace

namespace kda {

at::Tensor gate_bounded_reference(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK,
                                  double lower_bound) {
  return at::sigmoid(biased(z_NHK, dt_bias_HK) * a_log_H.exp().unsqueeze(-1)) * lower_bound;
}

at::Tensor gate_softplus_reference(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK) {
  return at::softplus(biased(z_NHK, dt_bias_HK), 1, 20) * -a_log_H.exp().unsqueeze(-1);
}

namespace {

at::Tensor gate_meta(const at::Tensor& z_NHK, const at::Tensor& a_log_H) {
  return at::empty_symint(z_NHK.sym_sizes(), z_NHK.options().dtype(a_log_H.scalar_type()));
}

at::Tensor gate_bounded_meta(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& /*dt_bias_HK*/,
                             double /*lower_bound*/) {
  return gate_meta(z_NHK, a_log_H);
}

at::Tensor gate_softplus_meta(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& /*dt_bias_HK*/) {
  return gate_meta(z_NHK, a_log_H);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gate_backward_meta(const at::Tensor& /*d_decay_log_NHK*/,
                                                                  const at::Tensor& z_NHK, const at::Tensor& a_log_H,
                                                                  const at::Tensor& dt_bias_HK,
                                                                  double /*lower_bound*/) {
  return {at::empty_symint(z_NHK.sym_sizes(), z_NHK.options()), at::empty_like(a_log_H),
          at::empty_like(dt_bias_HK, at::MemoryFormat::Contiguous)};
}

}  // namespace

}  // namespace kda

at::Tensor kda_gate_bounded(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK,
                            double lower_bound) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, double);
  static const auto op = find_op<Signature>("furlong::kda_gate_bounded");
  check_gate("kda_gate_bounded", z_NHK, a_log_H, dt_bias_HK);
  check_argument(lower_bound < 0, "kda_gate_bounded",
                 "lower_bound: got " + std::to_string(lower_bound) + ", need a negative number");
  return op.call(z_NHK, a_log_H, dt_bias_HK, lower_bound);
}

at::Tensor kda_gate_softplus(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&);
  static const auto op = find_op<Signature>("furlong::kda_gate_softplus");
  check_gate("kda_gate_softplus", z_NHK, a_log_H, dt_bias_HK);
  return op.call(z_NHK, a_log_H, dt_bias_HK);
}

}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("kda_gate_bounded(Tensor z, Tensor a_log, Tensor dt_bias, float lower_bound) -> Tensor");
  m.def("kda_gate_softplus(Tensor z, Tensor a_log, Tensor dt_bias) -> Tensor");
  // Gradient of both gates for CPU tensors; lower_bound 0 stands for the softplus gate.
  m.def(
      "_kda_gate_backward(Tensor d_decay_log, Tensor z, Tensor a_log, Tensor dt_bias, float lower_bound) -> "
      "(Tensor, Tensor, Tensor)");
}

#ifndef FURLONG_CUDA
TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("kda_gate_bounded", furlong::kda::gate_bounded_reference);
  m.impl("kda_gate_softplus", furlong::kda::gate_softplus_reference);
}
#endif

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("kda_gate_bounded", furlong::kda::gate_bounded_meta);
  m.impl("kda_gate_softplus", furlong::kda::gate_softplus_meta);
  m.impl("_kda_gate_backward", furlong::kda::gate_backward_meta);
}
