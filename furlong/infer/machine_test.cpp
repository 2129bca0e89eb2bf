#include "furlong/infer/machine.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

namespace furlong {
namespace {

TEST(Machine, LoadsExactlyOneOpenMpRuntime) {
  const auto runtimes = loaded_openmp_runtimes();
  EXPECT_EQ(runtimes.size(), 1u) << ::testing::PrintToString(runtimes);
}

TEST(Machine, AllThreadsRun) {
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "one core only";
  if (std::getenv("OMP_NUM_THREADS") != nullptr) GTEST_SKIP() << "OMP_NUM_THREADS is set";
  EXPECT_GE(at::get_num_threads(), 2);
  EXPECT_EQ(count_running_threads(), at::get_num_threads());
}

TEST(Machine, ExactModeHolds) {
  for (const ExactProbe& probe : probe_exact_mode()) {
    EXPECT_GT(probe.rows_checked, 500);
    EXPECT_EQ(probe.rows_different, 0) << probe.dtype;
  }
}

}  // namespace
}  // namespace furlong
