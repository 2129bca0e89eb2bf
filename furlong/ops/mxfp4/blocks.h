#pragma once

// Quantisation kernels over blocks of 32 values, free of tensors.

#include <cstdint>

#include "furlong/ops/mxfp4/mxfp4.h"

namespace furlong {

/// `count` blocks that lie end to end: 32 values (fp32 or bf16), 16 packed bytes and one scale byte each.
struct Mxfp4BlockKernels {
  void (*dequantize)(const uint8_t* packed, const uint8_t* scale, void* y, int64_t count);
  /// Stops at the first block that is not finite and returns it; otherwise -1.
  int64_t (*quantize)(const void* x, Mxfp4Scale rule, uint8_t* packed, uint8_t* scale, int64_t count);
  /// A block that is not finite becomes NaN.
  void (*fake_quantize)(const void* x, Mxfp4Scale rule, void* y, int64_t count);
};

/// The kernels for this processor.
Mxfp4BlockKernels mxfp4_block_kernels(bool bf16);

}  // namespace furlong
