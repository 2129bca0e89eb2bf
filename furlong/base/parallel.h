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

/// Calls body(i) for i in [0, count) on `count` threads at once, so that the calls may wait for one another; they must
/// not throw. Returns false, with nothing called, where the runtime does not give that many threads.
template <typename Body>
bool run_together(int64_t count, const Body& body) {
  bool enough = false;
#pragma omp parallel num_threads(static_cast<int>(count))
  if (omp_get_num_threads() == count) {
    if (omp_get_thread_num() == 0) enough = true;
    body(static_cast<int64_t>(omp_get_thread_num()));
  }
  return enough;
}

}  // namespace furlong
