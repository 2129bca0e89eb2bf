#include "furlong/optim/newton_schulz.h"

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "furlong/base/shape.h"
#include "furlong/optim/optimizer.h"

namespace furlong {

namespace {

// p(s) = a s + b s^3 + c s^5 lifts small singular values fastest and leaves those of [0, 1] in about [0.68, 1.13] after
// five steps; it does not converge to one, nor need it.
constexpr double kA = 3.4445;
constexpr double kB = -4.7750;
constexpr double kC = 2.0315;

}  // namespace

NewtonSchulzBuffers::NewtonSchulzBuffers(int64_t batch, int64_t rows, int64_t cols, at::TensorOptions options)
    : x_BRC(at::empty({batch, rows, cols}, options)),
      y_BRC(at::empty({batch, rows, cols}, options)),
      gram_BRR(at::empty({batch, rows, rows}, options)),
      poly_BRR(at::empty({batch, rows, rows}, options)) {}

at::Tensor newton_schulz_(NewtonSchulzBuffers& buffers, int64_t batch, int64_t steps) {
  at::Tensor x_BRC = buffers.x_BRC.narrow(0, 0, batch);
  at::Tensor y_BRC = buffers.y_BRC.narrow(0, 0, batch);
  at::Tensor gram_BRR = buffers.gram_BRR.narrow(0, 0, batch);
  at::Tensor poly_BRR = buffers.poly_BRR.narrow(0, 0, batch);
  for (int64_t step = 0; step < steps; ++step) {
    at::bmm_out(gram_BRR, x_BRC, x_BRC.mT());
    at::baddbmm_out(poly_BRR, gram_BRR, gram_BRR, gram_BRR, kB, kC);
    at::baddbmm_out(y_BRC, x_BRC, poly_BRR, x_BRC, kA, 1.0);
    std::swap(x_BRC, y_BRC);
  }
  return x_BRC;
}

at::Tensor newton_schulz(const at::Tensor& matrices, int64_t steps, bool bf16, double eps) {
  check_shape("newton_schulz", "matrices", matrices, {-1, -1, -1});
  const c10::NoGradGuard no_grad;
  const bool transposed = matrices.size(1) > matrices.size(2);
  const at::Tensor wide_BRC = transposed ? matrices.mT() : matrices;
  const at::Tensor norm_B11 = at::linalg_vector_norm(wide_BRC, 2, {1, 2}, true).clamp_min(eps);
  NewtonSchulzBuffers buffers(wide_BRC.size(0), wide_BRC.size(1), wide_BRC.size(2),
                              bf16 ? matrices.options().dtype(at::kBFloat16) : matrices.options());
  buffers.x_BRC.copy_(wide_BRC.div(norm_B11));
  const at::Tensor result_BRC = newton_schulz_(buffers, wide_BRC.size(0), steps).to(matrices.scalar_type());
  return transposed ? result_BRC.mT().contiguous() : result_BRC;
}

}  // namespace furlong
