#include "furlong/model/plan.h"

#include <gtest/gtest.h>

#include "furlong/model/count.h"

namespace furlong {
namespace {

const ModelConfig& nano() {
  static const ModelConfig config = ModelConfig::load(std::string(FURLONG_SOURCE_DIR) + "/configs/model/nano.toml");
  return config;
}

TEST(Plan, WeightsStatesAndCachesAreThoseOfTheCount) {
  const ModelCount sizes = count(nano());
  const PlanRequest request{.context = 1000, .batch = 3, .bf16 = true};
  EXPECT_EQ(plan_training(nano(), request).weights, 4 * sizes.parameters);
  const ServingBytes serving = plan_serving(nano(), request);
  EXPECT_EQ(serving.state, 3 * sizes.state_bytes);
  EXPECT_EQ(serving.conv_state, 3 * sizes.conv_state_bytes);
  EXPECT_EQ(serving.cache, 3000 * sizes.cache_bytes_per_token);
  EXPECT_LT(serving.weights, 4 * sizes.parameters);
}

TEST(Plan, OptionsChangeWhatTheySay) {
  PlanRequest request{.context = 1024, .batch = 8};
  const TrainingBytes plain = plan_training(nano(), request);
  request.recompute = true;
  EXPECT_LT(plan_training(nano(), request).activations, 0.5 * plain.activations);
  request = {.context = 1024, .batch = 8, .muon = false};
  EXPECT_GT(plan_training(nano(), request).optimizer, 1.5 * plain.optimizer);
  request = {.context = 1024, .batch = 16};
  EXPECT_GT(plan_training(nano(), request).activations, 1.8 * plain.activations);
  EXPECT_EQ(plan_training(nano(), request).weights, plain.weights);
}

}  // namespace
}  // namespace furlong
