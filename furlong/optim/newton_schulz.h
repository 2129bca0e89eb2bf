#pragma once

// The iteration of Muon, on buffers of the caller.

#include <ATen/core/Tensor.h>

namespace furlong {

/// Buffers for batches of up to `batch` matrices [rows, cols] with rows <= cols.
struct NewtonSchulzBuffers {
  at::Tensor x_BRC, y_BRC;        // the iterate, before and after a step
  at::Tensor gram_BRR, poly_BRR;  // X X^T, and b X X^T + c (X X^T)^2

  NewtonSchulzBuffers(int64_t batch, int64_t rows, int64_t cols, at::TensorOptions options);
};

/// Iterates on the first `batch` matrices of buffers.x_BRC, whose norms must not exceed one. Returns the result, a view
/// of one of the buffers.
at::Tensor newton_schulz_(NewtonSchulzBuffers& buffers, int64_t batch, int64_t steps);

}  // namespace furlong
