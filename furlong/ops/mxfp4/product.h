#pragma once

// Products straight from packed rows, free of tensors: one matrix, a few rows of activations.
//   O outputs   I inputs   R rows

#include <cstdint>
#include <optional>

namespace furlong {

/// Rows of one packed matrix: 16 bytes and one scale byte a block. Strides in bytes.
struct Mxfp4Matrix {
  const uint8_t* packed = nullptr;
  const uint8_t* scale = nullptr;
  int64_t packed_stride = 0;
  int64_t scale_stride = 0;
  int64_t inputs = 0;
};

/// The sums of an output run over the inputs in an order that depends on `inputs` and the instruction set alone: its
/// bits are the same whatever rows and outputs stand beside it.
struct Mxfp4ProductKernels {
  /// Size of one arranged row, a multiple of 4.
  int64_t (*arranged_bytes)(int64_t inputs);
  /// A row of x (fp32 or bf16) in the order in which the product meets its codes; zeros behind the last input.
  void (*arrange)(const void* x, int64_t inputs, void* to);
  /// y[r, o] = sum_i w[o, i] x[r, i] for r < rows and first <= o < last, in x's dtype. `x`: arranged rows end to end;
  /// `y`: row 0, output 0; `y_stride` in elements. False where a result is not finite, as a scale byte 255 makes it.
  bool (*product)(const Mxfp4Matrix& matrix, int64_t first, int64_t last, const void* x, int64_t rows, void* y,
                  int64_t y_stride);
};

/// The fastest kernels for this processor, for fp32 or bf16 activations.
Mxfp4ProductKernels mxfp4_product_kernels(bool bf16);

/// Those of the best instruction set that Highway knows.
Mxfp4ProductKernels mxfp4_simd_product_kernels(bool bf16);

/// Those of AVX512-BF16 dot products, for bf16 activations, where the processor has them.
std::optional<Mxfp4ProductKernels> mxfp4_dot_product_kernels();

}  // namespace furlong
