// MXFP4 quantisation on CPU tensors: fp32 and bf16 by the block kernels, fp64 values by the reference.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <atomic>
#include <string>
#include <vector>

#include "furlong/base/parallel.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/mxfp4/blocks.h"
#include "furlong/ops/mxfp4/checks.h"
#include "furlong/ops/mxfp4/layout.h"
#include "furlong/ops/mxfp4/reference.h"

namespace furlong {
namespace {

constexpr int64_t kGrain = 512;  // blocks of one range of a parallel loop

at::Tensor resized_last(const at::Tensor& like, int64_t last, at::ScalarType dtype) {
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes.back() = last;
  return at::empty(sizes, like.options().dtype(dtype));
}

at::Tensor dequantize_cpu(const at::Tensor& packed_in, const at::Tensor& scale_in, at::ScalarType dtype) {
  check_dequantize(packed_in, scale_in, dtype);
  const at::Tensor packed = packed_in.contiguous(), scale = scale_in.contiguous();
  check_mxfp4_scale("[mxfp4_dequantize] scale", scale);
  if (dtype == at::kDouble) return mxfp4_dequantize_reference(packed, scale, dtype);
  const at::Tensor y = resized_last(packed, 2 * packed.size(-1), dtype);
  const Mxfp4BlockKernels kernels = mxfp4_block_kernels(is_bf16(y));
  const uint8_t* codes = packed.const_data_ptr<uint8_t>();
  const uint8_t* bytes = scale.const_data_ptr<uint8_t>();
  char* values = static_cast<char*>(y.mutable_data_ptr());
  parallel_for(0, scale.numel(), kGrain, [&](int64_t first, int64_t last) {
    kernels.dequantize(codes + first * (kMxBlock / 2), bytes + first, values + first * kMxBlock * y.element_size(),
                       last - first);
  });
  return y;
}

/// The first of the blocks that ranges found not finite.
void keep_first(std::atomic<int64_t>* first_bad, int64_t block) {
  int64_t seen = first_bad->load();
  while (block < seen && !first_bad->compare_exchange_weak(seen, block)) {
  }
}

std::tuple<at::Tensor, at::Tensor> quantize_cpu(const at::Tensor& x_in, c10::string_view rule_name) {
  check_blocks("mxfp4_quantize", x_in, false);
  const Mxfp4Scale rule = mxfp4_scale_rule(std::string(rule_name));
  const at::Tensor x = x_in.contiguous();
  const int64_t blocks_of_row = x.size(-1) / kMxBlock;
  at::Tensor packed = resized_last(x, x.size(-1) / 2, at::kByte), scale = resized_last(x, blocks_of_row, at::kByte);
  const Mxfp4BlockKernels kernels = mxfp4_block_kernels(is_bf16(x));
  const char* values = static_cast<const char*>(x.const_data_ptr());
  uint8_t* codes = packed.mutable_data_ptr<uint8_t>();
  uint8_t* bytes = scale.mutable_data_ptr<uint8_t>();
  std::atomic<int64_t> first_bad = scale.numel();
  parallel_for(0, scale.numel(), kGrain, [&](int64_t first, int64_t last) {
    const int64_t bad = kernels.quantize(values + first * kMxBlock * x.element_size(), rule,
                                         codes + first * (kMxBlock / 2), bytes + first, last - first);
    if (bad >= 0) keep_first(&first_bad, first + bad);
  });
  if (first_bad == scale.numel()) return {packed, scale};
  throw NumericError("[mxfp4_quantize] x: row " + std::to_string(first_bad / blocks_of_row) + ", block " +
                     std::to_string(first_bad % blocks_of_row) + " holds NaN or infinity");
}

at::Tensor fake_quantize_cpu(const at::Tensor& x_in, c10::string_view rule_name) {
  check_blocks("mxfp4_fake_quantize", x_in, false);
  const Mxfp4Scale rule = mxfp4_scale_rule(std::string(rule_name));
  const at::Tensor x = x_in.contiguous(), y = at::empty_like(x);
  const Mxfp4BlockKernels kernels = mxfp4_block_kernels(is_bf16(x));
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  const int64_t block_bytes = kMxBlock * x.element_size();
  parallel_for(0, x.numel() / kMxBlock, kGrain, [&](int64_t first, int64_t last) {
    kernels.fake_quantize(from + first * block_bytes, rule, to + first * block_bytes, last - first);
  });
  return y;
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("mxfp4_dequantize", furlong::dequantize_cpu);
  m.impl("mxfp4_quantize", furlong::quantize_cpu);
  m.impl("mxfp4_fake_quantize", furlong::fake_quantize_cpu);
  m.impl("mxfp8_fake_quantize", furlong::mxfp8_fake_quantize_reference);
}
