// Published totals: Kimi K3 2,779.48 B parameters (text), 104.19 B active; Kimi-Linear 49.12 B and 3.11 B.

#include "furlong/model/count.h"

#include <gtest/gtest.h>

namespace furlong {
namespace {

ModelCount count_preset(const std::string& name) {
  return count(ModelConfig::load(std::string(FURLONG_SOURCE_DIR) + "/configs/model/" + name + ".toml"));
}

TEST(ModelCount, MatchesPublishedTotalsOfK3) {
  const ModelCount k3 = count_preset("kimi-k3");
  EXPECT_NEAR(k3.parameters / 1e9, 2779.48, 0.005);
  EXPECT_NEAR(k3.active_parameters / 1e9, 104.19, 0.005);
  EXPECT_NEAR(k3.embedding_parameters / 1e6, 1174.4, 0.05);
  EXPECT_NEAR(k3.routed_expert_parameters / 1e9, 2722.74, 0.005);
  EXPECT_NEAR(k3.flops_per_token / 1e9, 208.4, 0.05);
  EXPECT_NEAR(k3.kda_flops_per_token / 1e9, 0.76, 0.005);
  EXPECT_NEAR(k3.state_bytes / 1e6, 434.1, 0.05);
  EXPECT_NEAR(k3.conv_state_bytes / 1e6, 15.3, 0.05);
  EXPECT_EQ(k3.cache_bytes_per_token, 27648);
}

TEST(ModelCount, MatchesPublishedTotalsOfKimiLinear) {
  const ModelCount linear = count_preset("kimi-linear-48b");
  EXPECT_NEAR(linear.parameters / 1e9, 49.12, 0.005);
  EXPECT_NEAR(linear.active_parameters / 1e9, 3.11, 0.005);
  EXPECT_NEAR(linear.flops_per_token / 1e9, 6.21, 0.01);
  EXPECT_NEAR(linear.kda_flops_per_token / 1e9, 0.073, 0.0005);
  EXPECT_NEAR(linear.state_bytes / 1e6, 41.9, 0.05);
  EXPECT_NEAR(linear.conv_state_bytes / 1e6, 1.47, 0.005);
  EXPECT_EQ(linear.cache_bytes_per_token, 8064);
}

TEST(ModelCount, PresetsHaveTheSizesTheyName) {
  const ModelCount nano = count_preset("nano");
  EXPECT_GT(nano.parameters, 2e6);
  EXPECT_LT(nano.parameters, 6e6);
  EXPECT_GT(nano.active_parameters, 1.5e6);
  EXPECT_LT(nano.active_parameters, 3e6);
  EXPECT_LT(count_preset("tiny").parameters, 4e5);
  const ModelCount small = count_preset("small");
  EXPECT_GT(small.active_parameters, 40e6);
  EXPECT_LT(small.active_parameters, 60e6);
}

}  // namespace
}  // namespace furlong
