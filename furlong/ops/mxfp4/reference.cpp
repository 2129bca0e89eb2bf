// MXFP4 in tensor operations. Codes by counting the midpoints below a magnitude, powers of two from a table: nothing
// here rounds but the final cast.

#include "furlong/ops/mxfp4/reference.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/mxfp4/checks.h"
#include "furlong/ops/mxfp4/layout.h"

namespace furlong {

namespace {

/// 2^(byte - 127) in fp64; NaN for 255.
at::Tensor scale_of(const at::Tensor& bytes) {
  std::vector<double> powers(256);
  for (int byte = 0; byte < kMxNanScale; ++byte) powers[byte] = std::ldexp(1.0, byte - 127);
  powers[kMxNanScale] = std::numeric_limits<double>::quiet_NaN();
  return at::tensor(powers, at::kDouble).to(bytes.device()).index({bytes.to(at::kLong)});
}

/// x [..., I] as fp64 blocks [..., S, 32].
at::Tensor blocks_of(const at::Tensor& x) {
  return x.to(at::kDouble).unflatten(-1, {x.size(-1) / kMxBlock, kMxBlock});
}

/// Scale bytes [..., S]: floor(log2 amax) - max_exponent + 127, at least 0; 127 for zeros, 255 where a block is not
/// finite. `carry`: mantissas (in [1, 2)) from which on the exponent is one more.
at::Tensor scale_bytes(const at::Tensor& blocks, int64_t max_exponent, double carry) {
  const at::Tensor amax = blocks.abs().amax(-1);
  const auto [mantissa, exponent] = at::frexp(amax);  // mantissa in [0.5, 1)
  const at::Tensor floor_log2 = exponent.to(at::kLong) - 1 + mantissa.mul(2).ge(carry).to(at::kLong);
  const at::Tensor byte = (floor_log2 - max_exponent + 127).clamp(0, kMxNanScale - 1);
  const at::Tensor usual = at::where(amax.eq(0), 127, byte);
  return at::where(amax.isfinite(), usual, kMxNanScale).to(at::kByte);
}

}  // namespace

at::Tensor mxfp4_dequantize_reference(const at::Tensor& packed, const at::Tensor& scale, at::ScalarType dtype) {
  check_dequantize(packed, scale, dtype);
  const at::Tensor table =
      at::tensor({0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0}, at::kDouble)
          .to(packed.device());
  const at::Tensor codes = mxfp4_unpack(packed).to(at::kLong).unflatten(-1, {scale.size(-1), kMxBlock});
  return (table.index({codes}) * scale_of(scale).unsqueeze(-1)).flatten(-2).to(dtype);
}

std::tuple<at::Tensor, at::Tensor> mxfp4_quantize_reference(const at::Tensor& x, Mxfp4Scale rule) {
  check_blocks("mxfp4_quantize", x, false);
  const at::Tensor blocks = blocks_of(x);
  const at::Tensor scale = scale_bytes(blocks, 2, rule == Mxfp4Scale::kEven ? 1.75 : 2.0);
  const at::Tensor magnitude = (blocks / scale_of(scale).unsqueeze(-1)).abs();
  at::Tensor codes = at::zeros(magnitude.sizes(), magnitude.options().dtype(at::kByte));
  const double midpoints[] = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0};
  for (int below = 0; below < 7; ++below) {  // a tie goes up to an even code
    codes += below % 2 == 1 ? magnitude.ge(midpoints[below]) : magnitude.gt(midpoints[below]);
  }
  codes += blocks.signbit().to(at::kByte) * 8;
  return {mxfp4_pack(codes.flatten(-2)), scale};
}

at::Tensor mxfp4_fake_quantize_reference(const at::Tensor& x, Mxfp4Scale rule) {
  const auto [packed, scale] = mxfp4_quantize_reference(x, rule);
  return mxfp4_dequantize_reference(packed, scale, x.scalar_type());
}

std::tuple<at::Tensor, at::Tensor> mxfp8_quantize(const at::Tensor& x) {
  check_blocks("mxfp8_quantize", x, false);
  const at::Tensor blocks = blocks_of(x);
  const at::Tensor scale = scale_bytes(blocks, 8, 2.0);
  const at::Tensor scaled = (blocks / scale_of(scale).unsqueeze(-1)).clamp(-448.0, 448.0);
  return {scaled.flatten(-2).to(at::kFloat).to(at::kFloat8_e4m3fn), scale};
}

at::Tensor mxfp8_fake_quantize_reference(const at::Tensor& x) {
  const auto [codes, scale] = mxfp8_quantize(x);
  const at::Tensor values = blocks_of(codes) * scale_of(scale).unsqueeze(-1);
  return values.flatten(-2).to(x.scalar_type());
}

at::Tensor mxfp4_grouped_linear_reference(const at::Tensor& x_PI, at::TensorList packed, at::TensorList scale,
                                          const at::Tensor& offsets) {
  const int64_t outputs = check_grouped(x_PI, packed, scale, offsets);
  const std::vector<int64_t> bounds = group_bounds(x_PI, offsets);
  const at::ScalarType wide = arithmetic_type(x_PI);
  std::vector<at::Tensor> parts;
  for (size_t group = 0; group < packed.size(); ++group) {
    if (scale[group].is_cpu()) check_mxfp4_scale(name_of_scale(static_cast<int64_t>(group)), scale[group]);
    const at::Tensor weight_OI = mxfp4_dequantize_reference(packed[group], scale[group], wide);
    const at::Tensor x = x_PI.narrow(0, bounds[group], bounds[group + 1] - bounds[group]).to(wide);
    parts.push_back(x.matmul(weight_OI.t()).to(x_PI.scalar_type()));
  }
  parts.push_back(at::zeros({x_PI.size(0) - bounds.back(), outputs}, x_PI.options()));
  return at::cat(parts, 0);
}

}  // namespace furlong
