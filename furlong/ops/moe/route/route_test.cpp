#include "furlong/ops/moe/route/route.h"

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>

#include "furlong/base/error.h"
#include "furlong/ops/common/kernel.h"
#include "tests/support/gradient.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using testing::Tensors;

RouteOutput reference(const at::Tensor& logits, const at::Tensor& bias, const RouteConfig& c,
                      const std::optional<at::Tensor>& forced = std::nullopt) {
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  using Signature = Outputs(const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t, bool, double,
                            const std::optional<at::Tensor>&);
  const auto [ids, weights, scores, cutoff, margin] =
      find_op<Signature>("furlong::moe_route_reference")
          .call(logits, bias, c.num_chosen, c.num_groups, c.groups_kept, c.renormalize, c.scale, forced);
  return {ids, weights, scores, cutoff, margin};
}

const std::vector<RouteConfig> kConfigs = {
    {.num_chosen = 1},
    {.num_chosen = 3, .scale = 2.446},
    {.num_chosen = 4, .renormalize = false, .scale = 0.5},
    {.num_chosen = 12},
    {.num_chosen = 3, .num_groups = 4, .groups_kept = 2},
    {.num_chosen = 6, .num_groups = 4, .groups_kept = 2},
};

TEST(MoeRoute, MatchesReference) {
  for (const RouteConfig& config : kConfigs) {
    for (const int64_t tokens : {0, 1, 200}) {
      const at::Tensor logits = at::randn({tokens, 12}) * 2, bias = at::randn({12}) * 0.1;
      const RouteOutput got = moe_route(logits, bias, config, std::nullopt), expected = reference(logits, bias, config);
      EXPECT_TRUE(got.ids_NA.equal(expected.ids_NA));
      EXPECT_CLOSE(got.weights_NA, expected.weights_NA, tolerance::kFp32);
      EXPECT_CLOSE(got.scores_NE, expected.scores_NE, tolerance::kFp32);
      EXPECT_CLOSE(got.cutoff_N, expected.cutoff_N, tolerance::kFp32);
      if (tokens > 0) EXPECT_LE((got.margin_N - expected.margin_N).abs().max().item<float>(), 1e-6);
    }
  }
}

TEST(MoeRoute, TiesGoToTheLowestIndex) {
  const at::Tensor logits = at::zeros({2, 7});
  const at::Tensor bias = at::tensor({0.0f, 0.5f, 0.0f, 0.5f, 0.0f, 0.5f, 0.0f});
  const at::Tensor ids = moe_route(logits, bias, {.num_chosen = 4}, std::nullopt).ids_NA;
  EXPECT_TRUE(ids[0].equal(at::tensor({1, 3, 5, 0}, at::kLong)));
  EXPECT_TRUE(reference(logits, bias, {.num_chosen = 4}).ids_NA.equal(ids));
}

TEST(MoeRoute, CutoffIsTheFirstOutsider) {
  const at::Tensor logits = at::tensor({-1.0f, 2.0f, 0.5f, 1.0f}).view({1, 4});
  const RouteOutput two = moe_route(logits, at::zeros({4}), {.num_chosen = 2}, std::nullopt);
  EXPECT_EQ(two.cutoff_N.item<float>(), two.scores_NE[0][2].item<float>());
  EXPECT_FLOAT_EQ(two.margin_N.item<float>(), (two.scores_NE[0][3] - two.scores_NE[0][2]).item<float>());
  const RouteOutput all = moe_route(logits, at::zeros({4}), {.num_chosen = 4}, std::nullopt);
  EXPECT_EQ(all.cutoff_N.item<float>(), all.scores_NE[0][0].item<float>());
  EXPECT_EQ(all.margin_N.item<float>(), 0.0f);
}

TEST(MoeRoute, GradientMatchesReferenceAndFiniteDifferences) {
  at::manual_seed(7);
  for (const RouteConfig& config : kConfigs) {
    const at::Tensor bias = at::randn({12}, at::kDouble) * 0.1,
                     cotangent = at::randn({6, config.num_chosen}, at::kDouble);
    const Tensors logits = {at::randn({6, 12}, at::kDouble)};
    const auto op = [&](const Tensors& t) {
      return moe_route(t[0], bias.to(t[0].scalar_type()), config, std::nullopt).weights_NA;
    };
    const auto oracle = [&](const Tensors& t) { return reference(t[0], bias, config).weights_NA; };
    const at::Tensor expected = testing::gradients(oracle, logits, cotangent)[0];
    EXPECT_CLOSE(testing::gradients(op, logits, cotangent)[0], expected, tolerance::kFp64);
    EXPECT_CLOSE(testing::gradients(op, testing::to_dtype(logits, at::kFloat), cotangent)[0], expected,
                 tolerance::kFp32Chain);
    // A choice that changes within the step would spoil the difference, hence fixed logits.
    EXPECT_LE(testing::finite_difference_error(op, logits, cotangent), 1e-6);
  }
}

TEST(MoeRoute, NoGradientReachesTheBias) {
  const at::Tensor logits = at::randn({5, 6}).requires_grad_(), bias = at::zeros({6}).requires_grad_();
  moe_route(logits, bias, {.num_chosen = 2}, std::nullopt).weights_NA[0].square().sum().backward();
  EXPECT_FALSE(bias.grad().defined());
  EXPECT_TRUE(logits.grad().defined());
}

TEST(MoeRoute, ForcedIdsReplaceTheChoiceAndKeepTheGradient) {
  const at::Tensor forced = at::tensor({4, 0, 2, 2}, at::kLong).view({2, 2}), bias = at::zeros({5}, at::kDouble);
  const Tensors logits = {at::randn({2, 5}, at::kDouble)};
  const auto op = [&](const Tensors& t) { return moe_route(t[0], bias, {.num_chosen = 2}, forced).weights_NA; };
  const auto oracle = [&](const Tensors& t) { return reference(t[0], bias, {.num_chosen = 2}, forced).weights_NA; };
  EXPECT_TRUE(moe_route(logits[0], bias, {.num_chosen = 2}, forced).ids_NA.equal(forced));
  const at::Tensor cotangent = at::randn({2, 2}, at::kDouble);
  EXPECT_CLOSE(op(logits), oracle(logits), tolerance::kFp64);
  EXPECT_CLOSE(testing::gradients(op, logits, cotangent)[0], testing::gradients(oracle, logits, cotangent)[0],
               tolerance::kFp64);
  EXPECT_THROW(moe_route(logits[0], bias, {.num_chosen = 2}, forced + 1), UsageError);
}

TEST(MoeRoute, NonFiniteScoresAreAnError) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    at::Tensor logits = at::randn({3, 4});
    logits[1][2] = bad;
    EXPECT_THROW(moe_route(logits, at::zeros({4}), {.num_chosen = 2}, std::nullopt), NumericError);
  }
}

TEST(MoeRoute, RefusesBadShapes) {
  const at::Tensor logits = at::randn({3, 4}), bias = at::zeros({4});
  EXPECT_THROW(moe_route(logits, at::zeros({5}), {.num_chosen = 2}, std::nullopt), UsageError);
  EXPECT_THROW(moe_route(logits, bias, {.num_chosen = 5}, std::nullopt), UsageError);
  EXPECT_THROW(moe_route(logits, bias, {.num_chosen = 1, .num_groups = 3}, std::nullopt), UsageError);
  EXPECT_THROW(moe_route(logits.to(at::kBFloat16), bias, {.num_chosen = 2}, std::nullopt), UsageError);
  EXPECT_THROW(moe_route(logits, bias, {.num_chosen = 2}, at::zeros({3, 3}, at::kLong)), UsageError);
}

}  // namespace
}  // namespace furlong
