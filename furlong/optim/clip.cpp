#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "furlong/base/parallel.h"
#include "furlong/optim/optimizer.h"

namespace furlong {

namespace {

constexpr int64_t kPiece = 1 << 16;  // summed by one thread; fixed, so that the sum does not depend on their number
constexpr int64_t kLanes = 8;        // independent additions keep the adder busy

double piece_square_sum(const float* values, int64_t count) {
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      sums[lane] += value * value;
    }
  }
  for (; i < count; ++i) sums[0] += static_cast<double>(values[i]) * values[i];
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

double square_sum_cpu(const std::vector<at::Tensor>& grads) {
  struct Piece {
    const float* values;
    int64_t count;
  };
  std::vector<Piece> pieces;
  for (const at::Tensor& grad : grads) {
    const float* values = grad.const_data_ptr<float>();
    for (int64_t at = 0; at < grad.numel(); at += kPiece) {
      pieces.push_back({values + at, std::min(kPiece, grad.numel() - at)});
    }
  }
  std::vector<double> sums(pieces.size());
  parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) sums[i] = piece_square_sum(pieces[i].values, pieces[i].count);
  });
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace

double clip_grad_norm(const std::vector<Param>& params, double max_norm) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> flat_cpu;     // fp32, contiguous
  std::vector<at::Tensor> other_norms;  // of gradients elsewhere: fp64 scalars on their device
  for (const Param& param : params) {
    const at::Tensor grad = param.tensor->grad();
    if (!grad.defined()) continue;
    grads.push_back(grad);
    if (grad.is_cpu()) {
      flat_cpu.push_back(grad.to(at::kFloat).contiguous());
    } else {
      other_norms.push_back(at::linalg_vector_norm(grad, 2, {}, false, at::kDouble));
    }
  }
  double total = square_sum_cpu(flat_cpu);
  if (!other_norms.empty()) {
    const double norm = at::linalg_vector_norm(at::stack(other_norms)).item<double>();
    total += norm * norm;
  }
  const double norm = std::sqrt(total);
  if (max_norm > 0.0 && std::isfinite(norm) && norm > max_norm) {
    for (at::Tensor& grad : grads) grad.mul_(max_norm / norm);
  }
  return norm;
}

}  // namespace furlong
