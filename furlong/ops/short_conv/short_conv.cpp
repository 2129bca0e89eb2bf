#include "furlong/ops/short_conv/short_conv.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/short_conv/internal.h"

namespace furlong {

namespace short_conv_detail {

namespace {

void check_common(const char* op, const at::Tensor& x, const at::Tensor& weight_PW) {
  check_shape(op, "x_NP", x, {-1, -1});
  check_shape(op, "weight_PW", weight_PW, {x.size(1), -1});
  check_argument(weight_PW.size(1) >= 1, op, "weight_PW: need a kernel width of at least 1");
  const at::ScalarType input = x.scalar_type();
  check_argument(input == at::kFloat || input == at::kBFloat16 || input == at::kDouble, op,
                 std::string("x_NP: got ") + c10::toString(input) + ", need Float, BFloat16 or Double");
  check_dtype(op, "weight_PW", weight_PW, input == at::kDouble ? at::kDouble : at::kFloat);
}

std::tuple<at::Tensor, at::Tensor> meta(const at::Tensor& x_NP, const at::Tensor& weight_PW,
                                        const at::Tensor& /*offsets*/, const at::Tensor& offsets_host,
                                        const std::optional<at::Tensor>& /*initial_tail_BTP*/) {
  return {
      at::empty_like(x_NP, at::MemoryFormat::Contiguous),
      at::empty_symint({offsets_host.sym_size(0) - 1, weight_PW.sym_size(1) - 1, x_NP.sym_size(1)}, x_NP.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_meta(const at::Tensor& /*d_y_NP*/,
                                                             const std::optional<at::Tensor>& /*d_final_tail_BTP*/,
                                                             const at::Tensor& x_NP, const at::Tensor& weight_PW,
                                                             const at::Tensor& offsets_host,
                                                             const std::optional<at::Tensor>& /*initial_tail_BTP*/) {
  return {
      at::empty_like(x_NP, at::MemoryFormat::Contiguous), at::empty_like(weight_PW, at::MemoryFormat::Contiguous),
      at::empty_symint({offsets_host.sym_size(0) - 1, weight_PW.sym_size(1) - 1, x_NP.sym_size(1)}, x_NP.options())};
}

at::Tensor step_meta(const at::Tensor& x_BP, const at::Tensor& /*weight_PW*/, at::Tensor /*tail_STP*/,
                     const at::Tensor& /*slots_B*/) {
  return at::empty_like(x_BP, at::MemoryFormat::Contiguous);
}

}  // namespace

void check_arguments(const char* op, const at::Tensor& x_NP, const at::Tensor& weight_PW, const at::Tensor& offsets,
                     const at::Tensor& offsets_host, const std::optional<at::Tensor>& initial_tail_BTP) {
  check_common(op, x_NP, weight_PW);
  check_shape(op, "offsets_host", offsets_host, {-1});
  check_dtype(op, "offsets_host", offsets_host, at::kLong);
  check_argument(offsets_host.is_cpu() && offsets_host.is_contiguous() && offsets_host.numel() > 0, op,
                 "offsets_host: need a contiguous CPU tensor with at least one entry");
  const int64_t sequences = offsets_host.numel() - 1;
  check_shape(op, "offsets", offsets, {sequences + 1});
  const auto* starts = offsets_host.const_data_ptr<int64_t>();
  check_argument(starts[0] == 0, op, "offsets_host: got a first entry of " + std::to_string(starts[0]) + ", need 0");
  for (int64_t b = 0; b < sequences; ++b) {
    check_argument(starts[b] <= starts[b + 1], op, "offsets_host: got falling offsets, need rising ones");
  }
  check_argument(starts[sequences] <= x_NP.size(0), op,
                 "offsets_host: got " + std::to_string(starts[sequences]) + " tokens, need at most " +
                     std::to_string(x_NP.size(0)) + " (rows of x)");
  if (initial_tail_BTP.has_value()) {
    check_shape(op, "initial_tail_BTP", *initial_tail_BTP, {sequences, weight_PW.size(1) - 1, x_NP.size(1)});
    check_dtype(op, "initial_tail_BTP", *initial_tail_BTP, x_NP.scalar_type());
  }
}

}  // namespace short_conv_detail

std::tuple<at::Tensor, at::Tensor> short_conv(const at::Tensor& x_NP, const at::Tensor& weight_PW,
                                              const SequenceLayout& layout,
                                              const std::optional<at::Tensor>& initial_tail_BTP) {
  using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                       const at::Tensor&, const std::optional<at::Tensor>&);
  static const auto op = find_op<Signature>("furlong::short_conv");
  short_conv_detail::check_arguments("short_conv", x_NP, weight_PW, layout.offsets(), layout.offsets_host(),
                                     initial_tail_BTP);
  return op.call(x_NP, weight_PW, layout.offsets(), layout.offsets_host(), initial_tail_BTP);
}

at::Tensor short_conv_step_(const at::Tensor& x_BP, const at::Tensor& weight_PW, at::Tensor& tail_STP,
                            const at::Tensor& slots_B) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, at::Tensor, const at::Tensor&);
  static const auto op = find_op<Signature>("furlong::short_conv_step_");
  const char* name = "short_conv_step_";
  short_conv_detail::check_common(name, x_BP, weight_PW);
  check_shape(name, "tail_STP", tail_STP, {-1, weight_PW.size(1) - 1, x_BP.size(1)});
  check_dtype(name, "tail_STP", tail_STP, x_BP.scalar_type());
  check_shape(name, "slots_B", slots_B, {x_BP.size(0)});
  check_dtype(name, "slots_B", slots_B, at::kLong);
  return op.call(x_BP, weight_PW, tail_STP, slots_B);
}

}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def(
      "short_conv(Tensor x, Tensor weight, Tensor offsets, Tensor offsets_host, Tensor? initial_tail) -> "
      "(Tensor, Tensor)");
  m.def(
      "short_conv_reference(Tensor x, Tensor weight, Tensor offsets, Tensor offsets_host, Tensor? initial_tail) -> "
      "(Tensor, Tensor)");
  m.def(
      "_short_conv_backward(Tensor d_y, Tensor? d_final_tail, Tensor x, Tensor weight, Tensor offsets_host, "
      "Tensor? initial_tail) -> (Tensor, Tensor, Tensor)");
  m.def("short_conv_step_(Tensor x, Tensor weight, Tensor(a!) tail, Tensor slots) -> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("short_conv", furlong::short_conv_detail::meta);
  m.impl("_short_conv_backward", furlong::short_conv_detail::backward_meta);
  m.impl("short_conv_step_", furlong::short_conv_detail::step_meta);
}
