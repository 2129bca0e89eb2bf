#pragma once

// The MXFP4 operators in plain tensor operations, on any device.

#include "furlong/ops/mxfp4/mxfp4.h"

namespace furlong {

at::Tensor mxfp4_dequantize_reference(const at::Tensor& packed, const at::Tensor& scale, at::ScalarType dtype);
std::tuple<at::Tensor, at::Tensor> mxfp4_quantize_reference(const at::Tensor& x, Mxfp4Scale rule);
at::Tensor mxfp4_fake_quantize_reference(const at::Tensor& x, Mxfp4Scale rule);
/// E4M3 codes [..., I] and scale bytes [..., S] of x [..., I].
std::tuple<at::Tensor, at::Tensor> mxfp8_quantize(const at::Tensor& x);
at::Tensor mxfp8_fake_quantize_reference(const at::Tensor& x);
/// Reads the offsets on the host. Differentiable in x. A scale byte 255 is refused on the CPU, NaN elsewhere.
at::Tensor mxfp4_grouped_linear_reference(const at::Tensor& x_PI, at::TensorList packed, at::TensorList scale,
                                          const at::Tensor& offsets);

}  // namespace furlong
