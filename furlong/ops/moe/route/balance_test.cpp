#include "furlong/ops/moe/route/balance.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>

#include "furlong/base/error.h"
#include "furlong/ops/common/kernel.h"
#include "tests/support/skewed_router.h"

namespace furlong {
namespace {

/// q-th smallest required bias of each expert, q = ceil(N A / E): what the histogram rule aims at.
at::Tensor exact_bias(const RouteOutput& out, int64_t num_chosen) {
  const int64_t tokens = out.scores_NE.size(0), experts = out.scores_NE.size(1);
  const int64_t rank = (tokens * num_chosen + experts - 1) / experts;
  const at::Tensor required_NE = out.cutoff_N.unsqueeze(1) - out.scores_NE;
  return std::get<0>(required_NE.sort(0))[rank - 1];
}

TEST(QuantileBalancer, BalancesEightTokensOverFourExpertsInOneUpdate) {
  // Loads 4, 3, 1, 0 become 2, 2, 2, 2. Experts 0 and 1 are preferred by a little; the last two by nobody.
  const at::Tensor scores = at::tensor({0.90f, 0.50f, 0.40f, 0.10f, 0.88f, 0.52f, 0.30f, 0.12f,  //
                                        0.80f, 0.40f, 0.35f, 0.79f, 0.70f, 0.30f, 0.20f, 0.68f,  //
                                        0.50f, 0.90f, 0.40f, 0.10f, 0.40f, 0.88f, 0.30f, 0.12f,  //
                                        0.30f, 0.60f, 0.58f, 0.20f, 0.20f, 0.30f, 0.90f, 0.10f})
                                .view({8, 4});
  at::Tensor bias = at::zeros({4});
  const at::Tensor logits = scores.logit();
  const RouteConfig config{.num_chosen = 1};
  const auto load = [&] { return at::bincount(moe_route(logits, bias, config, std::nullopt).ids_NA.view(-1), {}, 4); };
  EXPECT_TRUE(load().equal(at::tensor({4, 3, 1, 0}, at::kLong)));
  QuantileBalancer balancer(4, 1);
  const RouteOutput out = moe_route(logits, bias, config, std::nullopt);
  balancer.observe(out.scores_NE, out.cutoff_N, bias, 8);
  EXPECT_TRUE(balancer.update(bias));
  EXPECT_TRUE(load().equal(at::tensor({2, 2, 2, 2}, at::kLong)));
  EXPECT_NEAR(bias.mean().item<double>(), 0.0, 1e-7);
}

TEST(QuantileBalancer, IsWithinOneBinOfTheExactQuantile) {
  struct Size {
    int64_t experts, chosen, tokens, bins;
  };
  for (const Size& size : {Size{8, 2, 96, 1000}, {12, 3, 70, 100}, {64, 4, 1000, 1000}, {896, 16, 512, 1000}}) {
    const SkewedRouter router{size.experts, size.chosen, size.tokens, 1.0, 5};
    at::Tensor bias = at::zeros({size.experts});
    for (int step = 0; step < 2; ++step) {
      const RouteOutput out = router.route(step, bias);
      const double low = bias.min().item<float>() - 1.0, high = bias.max().item<float>() + 1.0;
      at::Tensor exact = exact_bias(out, size.chosen);
      exact = exact - exact.mean();
      QuantileBalancer balancer(size.experts, size.chosen, size.bins);
      balancer.observe(out.scores_NE, out.cutoff_N, bias, size.tokens);
      EXPECT_TRUE(balancer.update(bias));
      // One bin for the quantile, one for the mean that both subtract.
      EXPECT_LE((bias - exact).abs().max().item<double>(), 2 * (high - low) / static_cast<double>(size.bins));
    }
  }
}

TEST(QuantileBalancer, BitsDoNotDependOnTheSplitIntoMicroBatches) {
  const SkewedRouter router{32, 4, 1024, 1.0, 9};
  at::Tensor start = at::randn({32}) * 0.1;
  const RouteOutput out = router.route(0, start);
  std::vector<at::Tensor> results;
  for (const int64_t parts : {1, 2, 4}) {
    at::Tensor bias = start.clone();
    QuantileBalancer balancer(32, 4);
    const int64_t rows = 1024 / parts;
    for (int64_t part = parts - 1; part >= 0; --part) {
      balancer.observe(out.scores_NE.narrow(0, part * rows, rows), out.cutoff_N.narrow(0, part * rows, rows), bias,
                       rows);
    }
    EXPECT_EQ(balancer.num_tokens(), 1024);
    EXPECT_EQ(balancer.counts_EQ().sum().item<int64_t>(), 1024 * 32);
    EXPECT_TRUE(balancer.update(bias));
    results.push_back(bias);
  }
  EXPECT_TRUE(results[1].equal(results[0]));
  EXPECT_TRUE(results[2].equal(results[0]));
}

TEST(QuantileBalancer, CountsValidTokensAlone) {
  at::Tensor scores = at::rand({10, 6}), cutoff = at::rand({10}), bias = at::zeros({6});
  scores.narrow(0, 7, 3).fill_(std::numeric_limits<float>::quiet_NaN());
  QuantileBalancer balancer(6, 2);
  balancer.observe(scores, cutoff, bias, 7);
  EXPECT_EQ(balancer.counts_EQ().sum().item<int64_t>(), 7 * 6);
  EXPECT_THROW(balancer.observe(scores, cutoff, bias, 8), NumericError);
}

TEST(QuantileBalancer, KernelCountsAsTheReference) {
  using Signature = at::Tensor&(at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t);
  const at::Tensor scores = at::rand({500, 20}), cutoff = at::rand({500}) + 0.2;
  const at::Tensor range = at::tensor({-0.7, 1.1}, at::kDouble);  // some required biases fall outside
  at::Tensor kernel = at::zeros({20, 37}, at::kInt), reference = at::zeros({20, 37}, at::kInt);
  find_op<Signature>("furlong::quantile_count_").call(kernel, scores, cutoff, range, 499);
  find_op<Signature>("furlong::quantile_count_reference_").call(reference, scores, cutoff, range, 499);
  EXPECT_TRUE(kernel.equal(reference));
}

TEST(QuantileBalancer, LeavesTheBiasAloneWhenThereIsNothingToBalance) {
  at::Tensor bias = at::randn({4});
  const at::Tensor before = bias.clone(), scores = at::rand({8, 4}), cutoff = at::rand({8});
  QuantileBalancer all(4, 4), few(4, 2), none(4, 2);
  all.observe(scores, cutoff, bias, 8);
  few.observe(scores, cutoff, bias, 1);
  EXPECT_FALSE(all.update(bias));
  EXPECT_FALSE(few.update(bias));
  EXPECT_FALSE(none.update(bias));
  QuantileBalancer discarded(4, 2);
  discarded.observe(scores, cutoff, bias, 8);
  discarded.discard();
  EXPECT_EQ(discarded.counts_EQ().sum().item<int64_t>(), 0);
  EXPECT_FALSE(discarded.update(bias));
  EXPECT_TRUE(bias.equal(before));
}

TEST(QuantileBalancer, ReportsBinsThatAreTooCoarse) {
  const SkewedRouter router{64, 4, 2048, 1.0, 3};
  at::Tensor bias = at::zeros({64});
  const RouteOutput out = router.route(0, bias);
  double mass[2];
  for (const int which : {0, 1}) {
    at::Tensor updated = bias.clone();
    QuantileBalancer balancer(64, 4, which == 0 ? 20 : 4000);
    balancer.observe(out.scores_NE, out.cutoff_N, updated, 2048);
    balancer.update(updated);
    mass[which] = balancer.last_bin_mass();
  }
  EXPECT_GT(mass[0], 0.5);
  EXPECT_GT(mass[0], 5 * mass[1]);
}

TEST(QuantileBalancer, RevivesDeadExpertsWithinFiveSteps) {
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    const SkewedRouter router{64, 4, 4096, 1.0, seed};
    // Experts 0 to 7 start far below everyone: no token reaches them.
    at::Tensor bias = at::zeros({64});
    bias.narrow(0, 0, 8).fill_(-2.0);
    QuantileBalancer balancer(64, 4);
    double late = 0.0;
    for (int64_t step = 0; step < 10; ++step) {
      const RouteOutput out = router.route(step, bias);
      const double violation = max_violation(router.load(out));
      if (step == 5) EXPECT_LT(violation, 2 * router.noise_floor());
      if (step >= 5) late += violation / 5;
      balancer.observe(out.scores_NE, out.cutoff_N, bias, router.tokens);
      balancer.update(bias);
    }
    EXPECT_LT(late, router.noise_floor());
  }
}

}  // namespace
}  // namespace furlong
