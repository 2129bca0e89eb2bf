// MXFP4: decoding, packing, quantisation by both scale rules; MXFP8 activations. Everything bit by bit.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>

#include <string>

#include "furlong/ops/mxfp4/mxfp4.h"
#include "furlong/ops/mxfp4/reference.h"
#include "tests/support/golden.h"

namespace furlong::golden {
namespace {

/// Equal with the sign of zero.
void expect_same_bits(Case& golden, const std::string& what, const at::Tensor& got, const at::Tensor& expected) {
  golden.expect(what, at::equal(got.contiguous().view(at::kInt), expected.contiguous().view(at::kInt)));
}

/// Scale bytes of blocks of zeros are each library's own.
void expect_scale(Case& golden, const std::string& what, const at::Tensor& got, const at::Tensor& expected,
                  const at::Tensor& x) {
  const at::Tensor zeros = x.unflatten(-1, {-1, kMxBlock}).eq(0).all(-1);
  golden.expect(what, (got.eq(expected) | zeros).all().item<bool>());
}

void run_decode(Case& golden) {
  const at::Tensor& packed = golden.tensor("packed");
  const at::Tensor& scale = golden.tensor("scale");
  const at::Tensor& expected = golden.tensor("out.values");
  expect_same_bits(golden, "values", mxfp4_dequantize(packed, scale, at::kFloat), expected);
  expect_same_bits(golden, "values by bf16", mxfp4_dequantize(packed, scale, at::kBFloat16).to(at::kFloat), expected);
}

void run_pack(Case& golden) {
  const at::Tensor& weight = golden.tensor("weight");
  for (const Mxfp4Scale rule : {Mxfp4Scale::kFloor, Mxfp4Scale::kEven}) {
    const auto [packed, scale] = mxfp4_quantize(weight, rule);
    const std::string suffix = std::string(" by ") + name_of(rule);
    golden.expect("weight_packed" + suffix, at::equal(packed, golden.tensor("out.weight_packed")));
    golden.expect("weight_scale" + suffix, at::equal(scale, golden.tensor("out.weight_scale")));
    expect_same_bits(golden, "weight" + suffix, mxfp4_dequantize(packed, scale, at::kFloat), weight);
  }
}

void run_quantize(Case& golden) {
  const at::Tensor& x = golden.tensor("x");
  for (const Mxfp4Scale rule : {Mxfp4Scale::kFloor, Mxfp4Scale::kEven}) {
    const std::string prefix = std::string("out.") + name_of(rule) + ".";
    const auto [packed, scale] = mxfp4_quantize(x, rule);
    expect_scale(golden, prefix + "scale", scale, golden.tensor(prefix + "scale"), x);
    golden.expect(prefix + "packed", at::equal(packed, golden.tensor(prefix + "packed")));
    expect_same_bits(golden, prefix + "dequantized", mxfp4_dequantize(packed, scale, at::kFloat),
                     golden.tensor(prefix + "dequantized"));
    expect_same_bits(golden, prefix + "fake", mxfp4_fake_quantize(x, rule), golden.tensor(prefix + "dequantized"));
  }
}

void run_mxfp8(Case& golden) {
  const at::Tensor& x = golden.tensor("x");
  const auto [codes, scale] = mxfp8_quantize(x);
  golden.expect("codes", at::equal(codes.view(at::kByte), golden.tensor("out.codes")));
  expect_scale(golden, "scale", scale, golden.tensor("out.scale"), x);
  expect_same_bits(golden, "dequantized", mxfp8_fake_quantize(x), golden.tensor("out.dequantized"));
}

}  // namespace

FURLONG_GOLDEN("mxfp4.decode", run_decode);
FURLONG_GOLDEN("mxfp4.pack", run_pack);
FURLONG_GOLDEN("mxfp4.quantize", run_quantize);
FURLONG_GOLDEN("mxfp4.mxfp8_activations", run_mxfp8);

}  // namespace furlong::golden
