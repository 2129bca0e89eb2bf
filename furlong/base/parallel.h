#pragma once

// parallel_for over OpenMP, header-only, so that kernels and torch-free rooms share one thread pool with LibTorch.
// The split into ranges is static: results do not depend on timing.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <exception>

namespace furlong {

inline int num_threads() {
  return omp_in_parallel() ? 1 : omp_get_max_threads();
}

/// Calls body(first, last) on disjoint ranges that cover [begin, end). Ranges hold at least `grain` items (but the
/// last). The first exception of any range is thrown again in the caller.
template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  const int64_t count = end - begin;
  if (count <= 0) return;
  const int64_t ranges =
      std::min<int64_t>(num_threads(), (count + std::max<int64_t>(grain, 1) - 1) / std::max<int64_t>(grain, 1));
  if (ranges <= 1) {
    body(begin, end);
    return;
  }
  std::exception_ptr error;
#pragma omp parallel for num_threads(static_cast<int>(ranges)) schedule(static, 1)
  for (int64_t range = 0; range < ranges; ++range) {
    try {
      body(begin + count * range / ranges, begin + count * (range + 1) / ranges);
    } catch (...) {
#pragma omp critical(furlong_parallel_for)
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace furlong
