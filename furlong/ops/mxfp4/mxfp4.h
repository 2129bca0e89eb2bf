#pragma once

// MXFP4 weights (OCP Microscaling 1.0, E2M1 elements): blocks of 32 consecutive inputs share a power of two.
//   O outputs   I inputs, a multiple of 32   B = I / 2 packed bytes   S = I / 32 scale bytes   G groups   P rows
//
//   value = (-1)^s m 2^(e - 127)   code = s m, m in {0, 0.5, 1, 1.5, 2, 3, 4, 6}   e = scale byte of the block
//
// The form every function takes is that of published folders (compressed-tensors): byte b of a row holds element 2b in
// its low and 2b + 1 in its high nibble. layout.h has the other published order, and tells them apart.

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

namespace furlong {

constexpr int64_t kMxBlock = 32;
/// The byte that the format keeps for "not a number"; refused everywhere.
constexpr int64_t kMxNanScale = 255;

/// How a block's exponent follows from its largest magnitude.
enum class Mxfp4Scale {
  kFloor,  // floor(log2 amax) - 2: the OCP rule
  kEven,   // the same after rounding amax to two significant bits: compressed-tensors
};

/// "floor" or "even", and back. UsageError for other names.
Mxfp4Scale mxfp4_scale_rule(const std::string& name);
const char* name_of(Mxfp4Scale rule);

/// Values [..., I] of packed [..., B] and scale [..., S], both uint8; `dtype` fp32, bf16 or fp64. Exact, with the sign
/// of zero; what lies beyond the range of fp32 (codes 4 and 6 under bytes 253 and 254) becomes infinite in fp32 and
/// bf16. On the CPU a scale byte 255 is a FormatError that names row and block. Schema furlong::mxfp4_dequantize.
at::Tensor mxfp4_dequantize(const at::Tensor& packed, const at::Tensor& scale, at::ScalarType dtype);

/// Packed [..., B] and scale [..., S] of x [..., I], fp32 or bf16. Nearest code, ties to the even one, at most 6; the
/// sign of zero is kept; a block of zeros gets byte 127. NaN or infinity is a NumericError on the CPU. Weights whose
/// blocks have 4 or 6 as their largest code come back byte by byte. Schema furlong::mxfp4_quantize.
std::tuple<at::Tensor, at::Tensor> mxfp4_quantize(const at::Tensor& x, Mxfp4Scale rule = Mxfp4Scale::kFloor);

/// dequantize(quantize(x)) in x's dtype without the bytes between; a block with NaN or infinity becomes NaN. The
/// gradient passes through unchanged. Schema furlong::mxfp4_fake_quantize.
at::Tensor mxfp4_fake_quantize(const at::Tensor& x, Mxfp4Scale rule = Mxfp4Scale::kFloor);

/// Fake quantisation to MXFP8 (E4M3, blocks of 32, scale 2^(floor(log2 amax) - 8), at most 448) with a straight-through
/// gradient: activations beside MXFP4 weights. x [..., I], fp32 or bf16. Tensor operations on every device.
at::Tensor mxfp8_fake_quantize(const at::Tensor& x);

/// Products with one packed matrix a group: y[n] = dequantized(packed[g], scale[g]) x[n] for offsets[g] <= n <
/// offsets[g + 1]. x [P, I] fp32, bf16 or fp64; packed[g] [O, B] and scale[g] [O, S] uint8, rows may be strided;
/// offsets [G + 1] int64 on x's device, from 0 up to at most P. Returns [P, O] in x's dtype; rows past the last group
/// are zero. Sums in fp32 (fp64 for fp64). Same bits for every number of threads. A scale byte 255 is a FormatError
/// that names group, row and block. Differentiable in x. Schema furlong::mxfp4_grouped_linear.
at::Tensor mxfp4_grouped_linear(const at::Tensor& x_PI, at::TensorList packed, at::TensorList scale,
                                const at::Tensor& offsets);

}  // namespace furlong
