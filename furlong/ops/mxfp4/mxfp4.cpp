// Schemas, shapes and the C++ entries of the MXFP4 operators; CUDA tensors run the references.

#include "furlong/ops/mxfp4/mxfp4.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/mxfp4/checks.h"
#include "furlong/ops/mxfp4/reference.h"

namespace furlong {

using QuantizeSignature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, c10::string_view);
using FakeQuantizeSignature = at::Tensor(const at::Tensor&, c10::string_view);

Mxfp4Scale mxfp4_scale_rule(const std::string& name) {
  if (name == "floor") return Mxfp4Scale::kFloor;
  if (name == "even") return Mxfp4Scale::kEven;
  throw UsageError("MXFP4 scale rule: got '" + name + "', need 'floor' or 'even'");
}

const char* name_of(Mxfp4Scale rule) {
  return rule == Mxfp4Scale::kFloor ? "floor" : "even";
}

at::Tensor mxfp4_dequantize(const at::Tensor& packed, const at::Tensor& scale, at::ScalarType dtype) {
  static const auto op = find_op<decltype(mxfp4_dequantize)>("furlong::mxfp4_dequantize");
  return op.call(packed, scale, dtype);
}

std::tuple<at::Tensor, at::Tensor> mxfp4_quantize(const at::Tensor& x, Mxfp4Scale rule) {
  static const auto op = find_op<QuantizeSignature>("furlong::mxfp4_quantize");
  return op.call(x, name_of(rule));
}

at::Tensor mxfp4_fake_quantize(const at::Tensor& x, Mxfp4Scale rule) {
  static const auto op = find_op<FakeQuantizeSignature>("furlong::mxfp4_fake_quantize");
  return op.call(x, name_of(rule));
}

at::Tensor mxfp8_fake_quantize(const at::Tensor& x) {
  static const auto op = find_op<decltype(mxfp8_fake_quantize)>("furlong::mxfp8_fake_quantize");
  return op.call(x);
}

at::Tensor mxfp4_grouped_linear(const at::Tensor& x_PI, at::TensorList packed, at::TensorList scale,
                                const at::Tensor& offsets) {
  static const auto op = find_op<decltype(mxfp4_grouped_linear)>("furlong::mxfp4_grouped_linear");
  return op.call(x_PI, packed, scale, offsets);
}

namespace {

Mxfp4Scale rule_of(c10::string_view name) {
  return mxfp4_scale_rule(std::string(name));
}

at::Tensor dequantize_meta(const at::Tensor& packed, const at::Tensor& scale, at::ScalarType dtype) {
  check_dequantize(packed, scale, dtype);
  std::vector<int64_t> sizes = packed.sizes().vec();
  sizes.back() *= 2;
  return at::empty(sizes, packed.options().dtype(dtype));
}

std::tuple<at::Tensor, at::Tensor> quantize_meta(const at::Tensor& x, c10::string_view rule) {
  check_blocks("mxfp4_quantize", x, false);
  rule_of(rule);
  std::vector<int64_t> packed = x.sizes().vec(), scale = packed;
  packed.back() /= 2;
  scale.back() /= kMxBlock;
  const auto options = x.options().dtype(at::kByte);
  return {at::empty(packed, options), at::empty(scale, options)};
}

at::Tensor fake_quantize_meta(const at::Tensor& x, c10::string_view rule) {
  check_blocks("mxfp4_fake_quantize", x, false);
  rule_of(rule);
  return at::empty_like(x, at::MemoryFormat::Contiguous);
}

at::Tensor mxfp8_fake_quantize_meta(const at::Tensor& x) {
  check_blocks("mxfp8_fake_quantize", x, false);
  return at::empty_like(x, at::MemoryFormat::Contiguous);
}

at::Tensor grouped_linear_meta(const at::Tensor& x_PI, at::TensorList packed, at::TensorList scale,
                               const at::Tensor& offsets) {
  return at::empty({x_PI.size(0), check_grouped(x_PI, packed, scale, offsets)}, x_PI.options());
}

std::tuple<at::Tensor, at::Tensor> quantize_reference(const at::Tensor& x, c10::string_view rule) {
  return mxfp4_quantize_reference(x, rule_of(rule));
}

at::Tensor fake_quantize_reference(const at::Tensor& x, c10::string_view rule) {
  return mxfp4_fake_quantize_reference(x, rule_of(rule));
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("mxfp4_dequantize(Tensor packed, Tensor scale, ScalarType dtype) -> Tensor");
  m.def("mxfp4_quantize(Tensor x, str rule) -> (Tensor packed, Tensor scale)");
  m.def("mxfp4_fake_quantize(Tensor x, str rule) -> Tensor");
  m.def("mxfp8_fake_quantize(Tensor x) -> Tensor");
  m.def("mxfp4_grouped_linear(Tensor x, Tensor[] packed, Tensor[] scale, Tensor offsets) -> Tensor");
  m.def("mxfp4_dequantize_reference(Tensor packed, Tensor scale, ScalarType dtype) -> Tensor");
  m.def("mxfp4_quantize_reference(Tensor x, str rule) -> (Tensor packed, Tensor scale)");
  m.def("mxfp4_fake_quantize_reference(Tensor x, str rule) -> Tensor");
  m.def("mxfp4_grouped_linear_reference(Tensor x, Tensor[] packed, Tensor[] scale, Tensor offsets) -> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("mxfp4_dequantize", furlong::dequantize_meta);
  m.impl("mxfp4_quantize", furlong::quantize_meta);
  m.impl("mxfp4_fake_quantize", furlong::fake_quantize_meta);
  m.impl("mxfp8_fake_quantize", furlong::mxfp8_fake_quantize_meta);
  m.impl("mxfp4_grouped_linear", furlong::grouped_linear_meta);
}

TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("mxfp4_dequantize", furlong::mxfp4_dequantize_reference);
  m.impl("mxfp4_quantize", furlong::quantize_reference);
  m.impl("mxfp4_fake_quantize", furlong::fake_quantize_reference);
  m.impl("mxfp8_fake_quantize", furlong::mxfp8_fake_quantize_reference);
  m.impl("mxfp4_grouped_linear", furlong::mxfp4_grouped_linear_reference);
}

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("mxfp4_dequantize_reference", furlong::mxfp4_dequantize_reference);
  m.impl("mxfp4_quantize_reference", furlong::quantize_reference);
  m.impl("mxfp4_fake_quantize_reference", furlong::fake_quantize_reference);
  m.impl("mxfp4_grouped_linear_reference", furlong::mxfp4_grouped_linear_reference);
}
