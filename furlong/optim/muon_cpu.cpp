// The passes around Newton-Schulz on the CPU, one block at a time: each reads and writes the parameter's memory once,
// the rest stays in cache. Plain loops: they wait for memory, not for arithmetic.

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "furlong/base/parallel.h"
#include "furlong/optim/muon_blocks.h"

namespace furlong {

namespace {

constexpr int64_t kLanes = 16;  // independent additions, for vector registers
constexpr int64_t kTile = 16;   // of a transposition: a cache line of fp32

/// momentum <- mu momentum + factor grad; direction is what follows from it. Returns the sum of the direction's
/// squares.
double update_momentum(const float* grad, float* momentum, float* direction, int64_t count, const MuonConfig& config) {
  const auto mu = static_cast<float>(config.momentum);
  const auto factor = static_cast<float>(config.average_momentum ? 1.0 - config.momentum : 1.0);
  // direction = a grad + b momentum, both forms in one loop.
  const float a = config.nesterov ? factor : 0.0f;
  const float b = config.nesterov ? mu : 1.0f;
  double total = 0.0;
  constexpr int64_t kPiece = 64 * kLanes;  // short enough for fp32 sums
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    const int64_t end = std::min(begin + kPiece, count);
    for (int64_t i = begin; i < end; ++i) {
      momentum[i] = mu * momentum[i] + factor * grad[i];
      direction[i] = a * grad[i] + b * momentum[i];
    }
    float sums[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += direction[i + lane] * direction[i + lane];
    }
    for (; i < end; ++i) sums[0] += direction[i] * direction[i];
    for (const float sum : sums) total += sum;
  }
  return total;
}

/// to[cols, rows] = factor * from[rows, cols]^T.
template <typename T>
void transpose_scaled(const float* from, int64_t rows, int64_t cols, float factor, T* to) {
  for (int64_t r0 = 0; r0 < rows; r0 += kTile) {
    const int64_t r1 = std::min(r0 + kTile, rows);
    for (int64_t c = 0; c < cols; ++c) {
      for (int64_t r = r0; r < r1; ++r) to[c * rows + r] = static_cast<T>(factor * from[r * cols + c]);
    }
  }
}

template <typename T>
void gather(const MuonRun& run, const MuonConfig& config, T* x_BRC) {
  const int64_t size = run.rows * run.cols;
  const int64_t start = run.first * size;
  const float* grad = run.param->grad.const_data_ptr<float>() + start;
  float* momentum = run.param->momentum.mutable_data_ptr<float>() + start;
  parallel_for(0, run.count, 1, [&](int64_t first, int64_t last) {
    std::vector<float> direction(size);
    for (int64_t block = first; block < last; ++block) {
      const int64_t at = block * size;
      const double norm = std::sqrt(update_momentum(grad + at, momentum + at, direction.data(), size, config));
      const auto factor = static_cast<float>(1.0 / std::max(norm, config.eps));
      T* x = x_BRC + at;
      if (run.transposed()) {
        transpose_scaled(direction.data(), run.rows, run.cols, factor, x);
      } else {
        for (int64_t i = 0; i < size; ++i) x[i] = static_cast<T>(factor * direction[i]);
      }
    }
  });
}

template <typename T>
void scatter(const MuonRun& run, const T* o_BRC, float keep, float rate) {
  const int64_t rows = run.rows;
  const int64_t cols = run.cols;
  float* weight = run.param->weight.mutable_data_ptr<float>() + run.first * rows * cols;
  parallel_for(0, run.count, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      float* w = weight + block * rows * cols;
      const T* o = o_BRC + block * rows * cols;
      if (!run.transposed()) {
        for (int64_t i = 0; i < rows * cols; ++i) w[i] = keep * w[i] - rate * static_cast<float>(o[i]);
        continue;
      }
      for (int64_t r0 = 0; r0 < rows; r0 += kTile) {
        const int64_t r1 = std::min(r0 + kTile, rows);
        for (int64_t c = 0; c < cols; ++c) {
          for (int64_t r = r0; r < r1; ++r) {
            float& value = w[r * cols + c];
            value = keep * value - rate * static_cast<float>(o[c * rows + r]);
          }
        }
      }
    }
  });
}

}  // namespace

void muon_gather_cpu(const MuonRun& run, const MuonConfig& config, const at::Tensor& x_BRC) {
  if (config.bf16) {
    gather(run, config, x_BRC.mutable_data_ptr<at::BFloat16>());
  } else {
    gather(run, config, x_BRC.mutable_data_ptr<float>());
  }
}

void muon_scatter_cpu(const MuonRun& run, const at::Tensor& o_BRC, double keep, double rate) {
  const auto keep_f32 = static_cast<float>(keep);
  const auto rate_f32 = static_cast<float>(rate);
  if (o_BRC.scalar_type() == at::kBFloat16) {
    scatter(run, o_BRC.const_data_ptr<at::BFloat16>(), keep_f32, rate_f32);
  } else {
    scatter(run, o_BRC.const_data_ptr<float>(), keep_f32, rate_f32);
  }
}

}  // namespace furlong
