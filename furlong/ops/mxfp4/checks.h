#pragma once

// Argument checks of the MXFP4 operators, made by every backend.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <string>
#include <vector>

#include "furlong/base/shape.h"
#include "furlong/ops/mxfp4/mxfp4.h"

namespace furlong {

inline void check_bytes(const char* op, const char* argument, const at::Tensor& tensor) {
  check_dtype(op, argument, tensor, at::kByte);
  check_argument(tensor.dim() >= 1, op, std::string(argument) + ": got a scalar, need at least one dimension");
}

/// packed [..., 16 S] and scale [..., S] with the same leading sizes.
inline void check_packed(const char* op, const at::Tensor& packed, const at::Tensor& scale) {
  check_bytes(op, "packed", packed);
  check_bytes(op, "scale", scale);
  const bool fits = packed.dim() == scale.dim() &&
                    packed.sizes().slice(0, packed.dim() - 1) == scale.sizes().slice(0, scale.dim() - 1);
  check_argument(fits && packed.size(-1) == scale.size(-1) * (kMxBlock / 2), op,
                 "packed " + shape_text(packed.sizes()) + " and scale " + shape_text(scale.sizes()) +
                     ": need [..., I / 2] and [..., I / 32]");
}

/// fp32 or bf16 (fp64 where allowed) with a last size of whole blocks.
inline void check_blocks(const char* op, const at::Tensor& x, bool fp64) {
  const at::ScalarType dtype = x.scalar_type();
  check_argument(dtype == at::kFloat || dtype == at::kBFloat16 || (fp64 && dtype == at::kDouble), op,
                 std::string("x: got ") + c10::toString(dtype) + ", need fp32 or bf16" + (fp64 ? " or fp64" : ""));
  check_argument(x.dim() >= 1 && x.size(-1) % kMxBlock == 0, op,
                 "x: got " + shape_text(x.sizes()) + ", need a last size that is a multiple of 32");
}

inline void check_dequantize(const at::Tensor& packed, const at::Tensor& scale, at::ScalarType dtype) {
  check_packed("mxfp4_dequantize", packed, scale);
  check_argument(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kDouble, "mxfp4_dequantize",
                 std::string("dtype: got ") + c10::toString(dtype) + ", need fp32, bf16 or fp64");
}

/// All but the values of `offsets`. Returns O.
inline int64_t check_grouped(const at::Tensor& x_PI, at::TensorList packed, at::TensorList scale,
                             const at::Tensor& offsets) {
  const char* op = "mxfp4_grouped_linear";
  check_shape(op, "x_PI", x_PI, {-1, -1});
  check_blocks(op, x_PI, true);
  check_argument(!packed.empty() && packed.size() == scale.size(), op,
                 "packed and scale: got " + std::to_string(packed.size()) + " and " + std::to_string(scale.size()) +
                     " tensors, need one each for every group, and one group at least");
  check_shape(op, "offsets", offsets, {static_cast<int64_t>(packed.size()) + 1});
  check_dtype(op, "offsets", offsets, at::kLong);
  check_argument(offsets.device() == x_PI.device(), op, "offsets and x_PI: need one device");
  const int64_t inputs = x_PI.size(1), outputs = packed[0].dim() == 2 ? packed[0].size(0) : 0;
  for (size_t group = 0; group < packed.size(); ++group) {
    const std::string suffix = "[" + std::to_string(group) + "]";
    check_shape(op, ("packed" + suffix).c_str(), packed[group], {outputs, inputs / 2});
    check_dtype(op, ("packed" + suffix).c_str(), packed[group], at::kByte);
    check_shape(op, ("scale" + suffix).c_str(), scale[group], {outputs, inputs / kMxBlock});
    check_dtype(op, ("scale" + suffix).c_str(), scale[group], at::kByte);
  }
  return outputs;
}

/// The offsets on the host: [G + 1], from 0 up to at most P.
inline std::vector<int64_t> group_bounds(const at::Tensor& x_PI, const at::Tensor& offsets) {
  const at::Tensor host = offsets.cpu().contiguous();
  const int64_t* data = host.const_data_ptr<int64_t>();
  std::vector<int64_t> bounds(data, data + host.numel());
  const bool rising = std::is_sorted(bounds.begin(), bounds.end());
  check_argument(rising && bounds.front() == 0 && bounds.back() <= x_PI.size(0), "mxfp4_grouped_linear",
                 "offsets: need values that rise from 0 up to at most " + std::to_string(x_PI.size(0)));
  return bounds;
}

/// What messages call the scale bytes of a group.
inline std::string name_of_scale(int64_t group) {
  return "[mxfp4_grouped_linear] scale[" + std::to_string(group) + "]";
}

[[noreturn]] inline void refuse_nan_scale(const std::string& name, int64_t row, int64_t block) {
  throw FormatError(name + ": scale byte 255 (not a number) in row " + std::to_string(row) + ", block " +
                    std::to_string(block));
}

}  // namespace furlong
