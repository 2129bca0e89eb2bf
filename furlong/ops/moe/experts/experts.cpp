// Schema, argument checks, shapes and the C++ entry of moe_experts.

#include "furlong/ops/moe/experts/experts.h"

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/moe/experts/experts_op.h"

namespace furlong {

namespace moe_experts_detail {

void check(const at::Tensor& z_NL, const at::Tensor& ids_NA, const at::Tensor& weights_NA, const at::Tensor& w1_EIL,
           const at::Tensor& w3_EIL, const at::Tensor& w2_ELI) {
  const char* op = "moe_experts";
  check_shape(op, "z_NL", z_NL, {-1, -1});
  check_shape(op, "ids_NA", ids_NA, {z_NL.size(0), -1});
  check_dtype(op, "ids_NA", ids_NA, at::kLong);
  check_shape(op, "weights_NA", weights_NA, {z_NL.size(0), ids_NA.size(1)});
  check_dtype(op, "weights_NA", weights_NA, arithmetic_type(z_NL));
  check_shape(op, "w1_EIL", w1_EIL, {-1, -1, z_NL.size(1)});
  check_shape(op, "w3_EIL", w3_EIL, {w1_EIL.size(0), w1_EIL.size(1), z_NL.size(1)});
  check_shape(op, "w2_ELI", w2_ELI, {w1_EIL.size(0), z_NL.size(1), w1_EIL.size(1)});
}

std::string activation_name(const Activation& activation) {
  return activation.kind == Activation::Kind::kSitu ? "situ" : "swiglu";
}

Activation make_activation(c10::string_view name, double beta, std::optional<double> linear_beta) {
  check_argument(name == "situ" || name == "swiglu", "moe_experts",
                 "activation: got '" + std::string(name) + "', need situ or swiglu");
  return {name == "situ" ? Activation::Kind::kSitu : Activation::Kind::kSwiglu, beta, linear_beta};
}

namespace {

at::Tensor meta(const at::Tensor& z_NL, const at::Tensor& ids_NA, const at::Tensor& weights_NA,
                const at::Tensor& w1_EIL, const at::Tensor& w3_EIL, const at::Tensor& w2_ELI,
                c10::string_view /*activation*/, double /*beta*/, std::optional<double> /*linear_beta*/) {
  check(z_NL, ids_NA, weights_NA, w1_EIL, w3_EIL, w2_ELI);
  return at::empty_like(z_NL);
}

}  // namespace

}  // namespace moe_experts_detail

at::Tensor moe_experts(const at::Tensor& z_NL, const at::Tensor& ids_NA, const at::Tensor& weights_NA,
                       const at::Tensor& w1_EIL, const at::Tensor& w3_EIL, const at::Tensor& w2_ELI,
                       const Activation& activation) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&, c10::string_view, double, std::optional<double>);
  static const auto op = find_op<Signature>("furlong::moe_experts");
  return op.call(z_NL, ids_NA, weights_NA, w1_EIL, w3_EIL, w2_ELI, moe_experts_detail::activation_name(activation),
                 activation.beta, activation.linear_beta);
}

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def(
      "moe_experts(Tensor z, Tensor ids, Tensor weights, Tensor w1, Tensor w3, Tensor w2, str activation, float beta, "
      "float? linear_beta) -> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("moe_experts", moe_experts_detail::meta);
}

}  // namespace furlong
