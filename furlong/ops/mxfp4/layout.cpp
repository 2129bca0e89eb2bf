#include "furlong/ops/mxfp4/layout.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include "furlong/base/shape.h"
#include "furlong/ops/mxfp4/checks.h"

namespace furlong {

Mxfp4Layout mxfp4_layout(const std::string& format) {
  if (format == "mxfp4-pack-quantized") return Mxfp4Layout::kPairs;
  if (format == "ggml-mxfp4") return Mxfp4Layout::kSplitHalves;
  throw FormatError("MXFP4 format: got '" + format +
                    "', need 'mxfp4-pack-quantized' (neighbours share a byte) or 'ggml-mxfp4' (halves of a block do)");
}

at::Tensor mxfp4_unpack(const at::Tensor& packed) {
  check_bytes("mxfp4_unpack", "packed", packed);
  return at::stack({packed.bitwise_and(15), packed.bitwise_right_shift(4)}, -1).flatten(-2);
}

at::Tensor mxfp4_pack(const at::Tensor& codes) {
  const char* op = "mxfp4_pack";
  check_bytes(op, "codes", codes);
  check_argument(codes.size(-1) % 2 == 0, op, "codes: got " + shape_text(codes.sizes()) + ", need an even last size");
  check_argument(codes.numel() == 0 || codes.max().item<int64_t>() < 16, op, "codes: got one above 15");
  const at::Tensor pairs = codes.unflatten(-1, {-1, 2});
  return pairs.select(-1, 0).bitwise_or(pairs.select(-1, 1).bitwise_left_shift(4));
}

std::tuple<at::Tensor, at::Tensor> mxfp4_from_split_halves(const at::Tensor& blocks) {
  const char* op = "mxfp4_from_split_halves";
  check_bytes(op, "blocks", blocks);
  check_argument(blocks.dim() >= 2 && blocks.size(-1) == kSplitBlockBytes, op,
                 "blocks: got " + shape_text(blocks.sizes()) + ", need [..., blocks, 17]");
  const at::Tensor bytes = blocks.narrow(-1, 1, kMxBlock / 2);
  const at::Tensor codes = at::cat({bytes.bitwise_and(15), bytes.bitwise_right_shift(4)}, -1);
  return {mxfp4_pack(codes.flatten(-2)), blocks.select(-1, 0).contiguous()};
}

at::Tensor mxfp4_to_split_halves(const at::Tensor& packed, const at::Tensor& scale) {
  check_packed("mxfp4_to_split_halves", packed, scale);
  const at::Tensor codes = mxfp4_unpack(packed).unflatten(-1, {-1, 2, kMxBlock / 2});
  const at::Tensor bytes = codes.select(-2, 0).bitwise_or(codes.select(-2, 1).bitwise_left_shift(4));
  return at::cat({scale.unsqueeze(-1), bytes}, -1);
}

void check_mxfp4_scale(const std::string& name, const at::Tensor& scale) {
  check_bytes("check_mxfp4_scale", "scale", scale);
  const at::Tensor bad = scale.eq(kMxNanScale);
  if (scale.numel() == 0 || !bad.any().item<bool>()) return;
  const int64_t first = bad.flatten().to(at::kInt).argmax().item<int64_t>();
  refuse_nan_scale(name, first / scale.size(-1), first % scale.size(-1));
}

}  // namespace furlong
