#include "furlong/infer/sampler.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "furlong/base/error.h"

namespace furlong {
namespace {

const at::Tensor kLogits = at::tensor({std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)});

std::array<double, 4> frequencies(const SamplingOptions& options) {
  constexpr int kDraws = 20000;
  std::array<double, 4> share{};
  for (int i = 0; i < kDraws; ++i) share[sample_token(kLogits, options, i).id] += 1.0 / kDraws;
  return share;
}

TEST(Sampler, DrawsWithTheGivenProbabilities) {
  const auto share = frequencies({.seed = 3});
  // Four standard deviations of a share of 20,000 draws are at most 0.014.
  EXPECT_NEAR(share[0], 0.5, 0.014);
  EXPECT_NEAR(share[1], 0.3, 0.014);
  EXPECT_NEAR(share[2], 0.15, 0.014);
  EXPECT_NEAR(share[3], 0.05, 0.014);
}

TEST(Sampler, TopPKeepsTheSmallestSetThatReachesIt) {
  const auto share = frequencies({.top_p = 0.7, .seed = 3});
  EXPECT_NEAR(share[0], 0.625, 0.014);
  EXPECT_NEAR(share[1], 0.375, 0.014);
  EXPECT_EQ(share[2], 0.0);
  EXPECT_EQ(frequencies({.top_p = 1e-9})[1], 0.0);
}

TEST(Sampler, TemperatureSharpens) {
  EXPECT_NEAR(frequencies({.temperature = 0.5, .seed = 3})[0], 0.25 / (0.25 + 0.09 + 0.0225 + 0.0025), 0.014);
}

TEST(Sampler, TemperatureZeroTakesTheMostLikelyAndTheLowestOfTies) {
  const Sample sample = sample_token(kLogits, {.temperature = 0.0}, 0);
  EXPECT_EQ(sample.id, 0);
  EXPECT_NEAR(sample.log_probability, std::log(0.5), 1e-6);
  EXPECT_EQ(sample_token(at::tensor({1.0f, 2.0f, 2.0f}), {.temperature = 0.0}, 0).id, 1);
}

TEST(Sampler, SeedAndIndexDecideTheDraw) {
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(sample_token(kLogits, {.seed = 5}, i).id, sample_token(kLogits, {.seed = 5}, i).id);
  }
}

TEST(Sampler, RefusesNonsense) {
  EXPECT_THROW(SamplingOptions{.temperature = -1}.validate(), UsageError);
  EXPECT_THROW(SamplingOptions{.top_p = 0}.validate(), UsageError);
  EXPECT_THROW(SamplingOptions{.top_p = 1.5}.validate(), UsageError);
  const at::Tensor nan = at::tensor({0.0f, std::numeric_limits<float>::quiet_NaN()});
  EXPECT_THROW(sample_token(nan, {}, 0), UsageError);
}

}  // namespace
}  // namespace furlong
