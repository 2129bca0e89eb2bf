#pragma once

// The per-token kernels of the read, free of tensors.
//   N tokens   D hidden   S sources

#include <cstdint>

namespace furlong {

/// sources[s], dsources[s], dout and out are contiguous [N, D] in fp32 or bf16 (all the same); w [D] and p [N, S] fp32.
struct AttnResRows {
  int64_t size = 0;     // D
  int64_t sources = 0;  // S
  float eps = 0.0f;
  const void* const* source = nullptr;
  const float* w = nullptr;
  const void* dout = nullptr;
  void* out = nullptr;
  float* p = nullptr;
  void* const* dsource = nullptr;
};

struct AttnResKernels {
  /// Tokens [first, last) of out and p.
  void (*read)(const AttnResRows& rows, int64_t first, int64_t last);
  /// Tokens [first, last) of the gradients of all sources; adds those tokens' share of w's gradient to dw[D].
  void (*read_backward)(const AttnResRows& rows, int64_t first, int64_t last, float* dw);
};

/// The kernels for this processor.
AttnResKernels attnres_kernels(bool bf16);

}  // namespace furlong
