#include "furlong/optim/schedule.h"

#include <gtest/gtest.h>

#include "furlong/base/error.h"

namespace furlong {
namespace {

TEST(Schedule, WarmsUpLinearly) {
  for (const char* kind : {"cosine", "wsd", "constant"}) {
    const Schedule schedule{.kind = kind, .peak_lr = 1.0, .warmup_ratio = 0.1};
    EXPECT_DOUBLE_EQ(schedule.lr(0, 100), 0.1);
    EXPECT_DOUBLE_EQ(schedule.lr(9, 100), 1.0);
    EXPECT_DOUBLE_EQ(schedule.lr(10, 100), 1.0);
  }
}

TEST(Schedule, CosineFallsToTheFloor) {
  const Schedule schedule{.kind = "cosine", .peak_lr = 2.0, .final_lr_ratio = 0.1, .warmup_ratio = 0.1};
  EXPECT_DOUBLE_EQ(schedule.lr(55, 100), 1.1);  // half-way
  EXPECT_DOUBLE_EQ(schedule.lr(100, 100), 0.2);
  EXPECT_DOUBLE_EQ(schedule.lr(1000, 100), 0.2);  // past the end
  for (int64_t step = 10; step < 99; ++step) EXPECT_GT(schedule.lr(step, 100), schedule.lr(step + 1, 100));
}

TEST(Schedule, WsdHoldsThenFallsLinearly) {
  const Schedule schedule{
      .kind = "wsd", .peak_lr = 1.0, .final_lr_ratio = 0.0, .warmup_ratio = 0.01, .decay_ratio = 0.2};
  EXPECT_DOUBLE_EQ(schedule.lr(80, 100), 1.0);
  EXPECT_NEAR(schedule.lr(90, 100), 0.5, 1e-12);
  EXPECT_NEAR(schedule.lr(100, 100), 0.0, 1e-12);
}

TEST(Schedule, WarmsUpForAtLeastOneStepAndCopesWithShortRuns) {
  const Schedule schedule{.peak_lr = 1.0};
  EXPECT_DOUBLE_EQ(schedule.lr(0, 1), 1.0);
  EXPECT_DOUBLE_EQ(schedule.lr(0, 0), 1.0);
  EXPECT_GT(schedule.lr(1, 2), 0.0);
  EXPECT_DOUBLE_EQ((Schedule{.kind = "wsd", .peak_lr = 1.0, .warmup_ratio = 1.0}.lr(3, 4)), 1.0);
}

TEST(Schedule, RefusesUnknownKinds) {
  EXPECT_THROW((Schedule{.kind = "linear"}.lr(50, 100)), ConfigError);
}

}  // namespace
}  // namespace furlong
