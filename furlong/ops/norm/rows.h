#pragma once

// The row kernels of the norms, free of tensors: contiguous rows of `size`, arithmetic fp32.

#include <cstdint>

namespace furlong {

/// What a kernel reads and writes. x, gate, dy, y, dx and dgate are fp32 or bf16 (all the same); pointers that a kernel
/// has no use for are null.
struct NormRows {
  int64_t size = 0;
  float eps = 0.0f;
  const void* x = nullptr;
  const float* weight = nullptr;
  const void* gate = nullptr;
  const void* dy = nullptr;
  void* y = nullptr;
  void* dx = nullptr;
  void* dgate = nullptr;
};

/// Kernels over rows [first, last). The backward ones add those rows' share of the weight's gradient to dweight[size].
struct NormKernels {
  using Forward = void (*)(const NormRows& norm, int64_t first, int64_t last);
  using Backward = void (*)(const NormRows& norm, int64_t first, int64_t last, float* dweight);
  Forward rms_norm, gated_rms_norm, l2_norm;
  Backward rms_norm_backward, gated_rms_norm_backward, l2_norm_backward;
};

/// The kernels for this processor.
NormKernels norm_kernels(bool bf16);

}  // namespace furlong
