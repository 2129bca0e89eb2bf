#pragma once

// The two published orders of MXFP4 bytes, and checks of what a file brings.
//
//   pairs        "mxfp4-pack-quantized" (compressed-tensors): packed [O, I / 2] and scale [O, I / 32] are two tensors;
//                byte b of a row holds elements 2b (low nibble) and 2b + 1 (high)
//   split halves "ggml-mxfp4" (type MXFP4 of GGUF files): one tensor [O, I / 32, 17]; a block is its scale byte and 16
//                bytes, of which byte i holds elements i (low) and i + 16 (high)

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

namespace furlong {

enum class Mxfp4Layout { kPairs, kSplitHalves };

/// Bytes of one block in split halves.
constexpr int64_t kSplitBlockBytes = 17;

/// The layout that a checkpoint's format name stands for. FormatError for every other name: a guess would permute
/// values within their blocks.
Mxfp4Layout mxfp4_layout(const std::string& format);

/// Codes 0..15 [..., 2B] of packed [..., B], uint8, in the order of elements; and back.
at::Tensor mxfp4_unpack(const at::Tensor& packed);
at::Tensor mxfp4_pack(const at::Tensor& codes);

/// Split halves [..., S, 17] into pairs: packed [..., 16 S] and scale [..., S]; and back. Codes and scales stay as they
/// are.
std::tuple<at::Tensor, at::Tensor> mxfp4_from_split_halves(const at::Tensor& blocks);
at::Tensor mxfp4_to_split_halves(const at::Tensor& packed, const at::Tensor& scale);

/// FormatError, with `name` (of the checkpoint's tensor), row and block, where a scale byte is 255. scale [..., S].
void check_mxfp4_scale(const std::string& name, const at::Tensor& scale);

}  // namespace furlong
