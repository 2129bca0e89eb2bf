#pragma once

// The elementwise kernels of the gated activations, free of tensors. Arithmetic fp32.

#include <cstdint>

namespace furlong {

/// All pointers fp32 or bf16 (all the same). The forward reads gate and up and writes y; the backward reads gate, up
/// and dy and writes dgate and dup.
struct GluElements {
  float beta = 1.0f;
  float linear_beta = 0.0f;  // 0: `up` is taken as is
  const void* gate = nullptr;
  const void* up = nullptr;
  const void* dy = nullptr;
  void* y = nullptr;
  void* dgate = nullptr;
  void* dup = nullptr;
};

/// Kernels over elements [first, last).
struct GluKernels {
  using Kernel = void (*)(const GluElements& glu, int64_t first, int64_t last);
  Kernel situ, swiglu, situ_backward, swiglu_backward;
};

/// The kernels for this processor.
GluKernels glu_kernels(bool bf16);

}  // namespace furlong
