#pragma once

// Sums over all rows, as weight gradients need them, with bits that depend on neither thread count nor timing: the rows
// are cut into a number of parts that follows from their count alone, each part sums in order into a row of its own,
// and the parts are added in order.

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>

#include "furlong/base/parallel.h"

namespace furlong {

/// body(first, last, sums) for every part, in parallel; `sums` points at `size` zeroed floats. Returns the total, fp32
/// [size]. 16 parts keep 16 threads busy; parts below 64 rows are not worth a row of sums.
template <typename Body>
at::Tensor sum_over_rows(int64_t rows, int64_t size, const Body& body) {
  const int64_t parts = std::clamp<int64_t>(rows / 64, 1, 16);
  const at::Tensor sums = at::zeros({parts, size}, at::kFloat);
  float* data = sums.mutable_data_ptr<float>();
  parallel_for(0, parts, 1, [&](int64_t first_part, int64_t last_part) {
    for (int64_t part = first_part; part < last_part; ++part) {
      body(rows * part / parts, rows * (part + 1) / parts, data + part * size);
    }
  });
  for (int64_t part = 1; part < parts; ++part) {
    for (int64_t i = 0; i < size; ++i) data[i] += data[part * size + i];
  }
  return sums[0];
}

}  // namespace furlong
