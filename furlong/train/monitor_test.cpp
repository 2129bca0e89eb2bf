#include "furlong/train/monitor.h"

#include <gtest/gtest.h>

#include <cmath>

namespace furlong {
namespace {

MonitorConfig config(const std::string& on_spike) {
  return {.sigma = 6.0, .window = 16, .min_samples = 8, .on_spike = on_spike};
}

void feed(Monitor& monitor, int steps) {
  for (int i = 0; i < steps; ++i) ASSERT_EQ(monitor.judge(3.0 + 0.01 * (i % 3), 1.0, "").kind, Verdict::Kind::kOk);
}

TEST(Monitor, NanIsSkippedAndNeverEntersTheWindow) {
  Monitor monitor(config("skip"));
  feed(monitor, 16);
  const Json before = monitor.state();
  EXPECT_EQ(monitor.judge(NAN, 1.0, "").kind, Verdict::Kind::kSkip);
  EXPECT_EQ(monitor.judge(3.0, INFINITY, "").kind, Verdict::Kind::kSkip);
  EXPECT_EQ(monitor.judge(NAN, NAN, "router").reason, "router");
  EXPECT_EQ(monitor.state(), before);
  feed(monitor, 16);
}

TEST(Monitor, SixSigmaIsSkippedOrMarked) {
  Monitor skipping(config("skip")), marking(config("mark"));
  feed(skipping, 16);
  feed(marking, 16);
  EXPECT_EQ(skipping.judge(9.0, 1.0, "").kind, Verdict::Kind::kSkip);
  const Verdict marked = marking.judge(9.0, 1.0, "");
  EXPECT_EQ(marked.kind, Verdict::Kind::kSpike);
  EXPECT_TRUE(marked.take());
  EXPECT_NE(marked.reason.find("loss 9"), std::string::npos);
}

TEST(Monitor, ALastingChangeOfLevelIsAccepted) {
  Monitor monitor(config("skip"));
  feed(monitor, 16);
  int skipped = 0;
  for (int i = 0; i < 20; ++i) skipped += monitor.judge(9.0, 1.0, "").take() ? 0 : 1;
  EXPECT_LT(skipped, 5);
}

TEST(Monitor, SaysNothingBeforeItHasSeenEnough) {
  Monitor monitor(config("skip"));
  feed(monitor, 7);
  EXPECT_TRUE(monitor.judge(1000.0, 1.0, "").take());
}

TEST(Monitor, StateSurvivesTextWithEveryBit) {
  Monitor monitor(config("skip"));
  for (int i = 0; i < 30; ++i) monitor.judge(1.0 / (3 + i), std::sqrt(2.0 + i), "");
  Monitor again(config("skip"));
  again.restore(Json::parse(monitor.state().dump()), "here");
  EXPECT_EQ(again.state(), monitor.state());
}

}  // namespace
}  // namespace furlong
