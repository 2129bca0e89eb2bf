#include "furlong/train/machine_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/tiny_run.h"

namespace furlong {
namespace {

using testing::HasSubstr;
using testing_support::tiny_config;

std::string refusal(const std::vector<std::string>& assignments) {
  try {
    check_machine(tiny_config("data", assignments));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(MachineLimits, AcceptsWhatFits) {
  EXPECT_EQ(refusal({}), "");
}

TEST(MachineLimits, RefusesWhatNeedsMoreMemoryThanThereIs) {
  EXPECT_THAT(refusal({"model.hidden_size=1048576", "model.intermediate_size=1048576"}), HasSubstr("key 'model'"));
  EXPECT_THAT(refusal({"stages.1.rows=16777216", "stages.1.micro_rows=0"}), HasSubstr("key 'stages.1'"));
  EXPECT_EQ(refusal({"stages.1.micro_rows=1"}), "");
}

TEST(MachineLimits, RefusesADeviceThatIsNotThere) {
  EXPECT_THAT(refusal({"device=\"cuda:99\""}), HasSubstr("'cuda:99'"));
}

}  // namespace
}  // namespace furlong
