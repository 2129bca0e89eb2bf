// quantile_balance.*: the histogram update against the exact quantiles, the report's example, ties, and the optimum of
// the balanced assignment as a bound.
//   N tokens   E experts   A chosen

#include <ATen/TensorOperators.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "furlong/ops/moe/route/balance.h"
#include "furlong/ops/moe/route/route.h"
#include "tests/support/golden.h"

namespace furlong::golden {
namespace {

/// The scores of a case as the router would see them: through logits the sigmoid would round, so the choice is made
/// from the scores themselves, by the rule of moe_route.
struct Choice {
  at::Tensor ids_NA, cutoff_N, load_E;
};

Choice choose(const at::Tensor& scores_NE, const at::Tensor& bias_E, int64_t num_chosen) {
  const auto [best, order] = (scores_NE + bias_E).sort(/*stable=*/true, 1, /*descending=*/true);
  const at::Tensor ids = order.narrow(1, 0, num_chosen);
  return {ids, best.select(1, num_chosen).contiguous(), at::bincount(ids.reshape(-1), {}, scores_NE.size(1))};
}

/// Exact rule: minus the (q+1)-th largest margin s - alpha of each expert (the next lower one for a non-integer q).
at::Tensor exact_quantile(const at::Tensor& scores_NE, const at::Tensor& cutoff_N, int64_t num_chosen) {
  const double rank = static_cast<double>(scores_NE.size(0) * num_chosen) / static_cast<double>(scores_NE.size(1));
  const at::Tensor margins = std::get<0>((scores_NE - cutoff_N.unsqueeze(1)).sort(0, /*descending=*/true));
  return -margins[static_cast<int64_t>(std::floor(rank))];
}

at::Tensor centred(const at::Tensor& bias_E) {
  return bias_E - bias_E.mean();
}

int64_t num_chosen(const Case& test) {
  return test.info().at("constants").at("k");
}

/// One histogram update from b = 0 with the case's number of bins.
void check_histogram(Case& test, const at::Tensor& scores_NE, int64_t num_bins) {
  const std::string prefix = "out.hist" + std::to_string(num_bins) + ".";
  at::Tensor bias = at::zeros({scores_NE.size(1)}, scores_NE.options());
  QuantileBalancer balancer(scores_NE.size(1), num_chosen(test), num_bins);
  const Choice choice = choose(scores_NE, bias, num_chosen(test));
  balancer.observe(scores_NE, choice.cutoff_N, bias, scores_NE.size(0));
  const at::Tensor moved = (balancer.counts_EQ() - test.tensor(prefix + "counts")).abs().sum(1);
  const bool same_counts = moved.max().item<int64_t>() == 0;
  test.expect("counts", moved.max().item<int64_t>() <= 4, "a token in a neighbouring bin counts twice");
  test.expect("update", balancer.update(bias));
  const double bin_width = 2.0 / static_cast<double>(num_bins);
  const at::Tensor expected = test.f32(prefix + "b");
  const double tolerance = same_counts ? test.tolerance("values") : bin_width / expected.abs().max().item<double>();
  test.expect_close("histogram b", bias, expected, tolerance);
}

void run_exact(Case& test) {
  const at::Tensor scores = test.f32("scores"), expected_b = test.f32("out.b"), loads = test.tensor("out.loads");
  at::Tensor bias = at::zeros({scores.size(1)}, scores.options());
  for (int64_t step = 0; step < expected_b.size(0); ++step) {
    const Choice choice = choose(scores, bias, num_chosen(test));
    const int64_t slack = step == 0 ? 0 : 1;
    test.expect("loads", (choice.load_E - loads[step]).abs().max().item<int64_t>() <= slack);
    const at::Tensor updated = exact_quantile(scores, choice.cutoff_N, num_chosen(test));
    test.expect_close("b_hat", updated, test.f32("out.b_hat")[step], test.tolerance("values"));
    bias = centred(updated);
    test.expect_close("b", bias, expected_b[step], test.tolerance("values"));
    bias = expected_b[step];
  }
  for (const Json& bins : test.info().at("constants").at("bins")) check_histogram(test, scores, bins);
}

/// Alpha and exact values, and the histogram update within one bin plus the gap of order statistics.
void run_report(Case& test) {
  const at::Tensor scores = test.f32("scores");
  at::Tensor bias = test.f32("bias").clone();
  const Choice before = choose(scores, bias, num_chosen(test));
  test.expect_close("alpha", before.cutoff_N, test.f32("out.alpha"), test.tolerance("values"));
  test.expect("loads before", before.load_E.equal(test.tensor("out.loads_before")));
  const at::Tensor updated = exact_quantile(scores, before.cutoff_N, num_chosen(test));
  test.expect_close("b_hat", updated, test.f32("out.b_hat"), test.tolerance("values"));
  test.expect_close("b", centred(updated), test.f32("out.b"), test.tolerance("values"));
  QuantileBalancer balancer(scores.size(1), num_chosen(test));
  balancer.observe(scores, before.cutoff_N, bias, scores.size(0));
  test.expect("update", balancer.update(bias));
  test.expect("loads after", choose(scores, bias, num_chosen(test)).load_E.equal(test.tensor("out.loads_after")));
}

void run_ties(Case& test) {
  const at::Tensor scores = test.f32("scores");
  const at::Tensor zero = at::zeros({scores.size(1)}, scores.options());
  // Scores are multiples of 1/8: the bias carries them while every logit is 0, so that ties stay exact.
  const Choice choice = choose(scores, zero, num_chosen(test));
  test.expect_close("alpha", choice.cutoff_N, test.f32("out.alpha"), test.tolerance("values"));
  test.expect("ids", std::get<0>(choice.ids_NA.sort(1)).equal(std::get<0>(test.tensor("out.ids").sort(1))));
  for (int64_t n = 0; n < scores.size(0); ++n) {
    const RouteOutput out = moe_route(at::zeros({1, scores.size(1)}, scores.options()), scores[n] - 0.5,
                                      {.num_chosen = num_chosen(test)}, std::nullopt);
    test.expect("ids of moe_route",
                std::get<0>(out.ids_NA.sort(1)).equal(std::get<0>(test.tensor("out.ids").narrow(0, n, 1).sort(1))));
  }
  const at::Tensor updated = exact_quantile(scores, choice.cutoff_N, num_chosen(test));
  test.expect_close("b_hat", updated, test.f32("out.b_hat"), test.tolerance("values"));
  test.expect_close("b", centred(updated), test.f32("out.b"), test.tolerance("values"));
}

/// sum_ij max(0, s_ij - alpha_i - beta_j) + k sum alpha + q sum beta with beta = -b and the best alpha for it.
double dual_objective(const at::Tensor& scores_NE, const at::Tensor& bias_E, int64_t chosen) {
  const at::Tensor biased = scores_NE.to(at::kDouble) + bias_E.to(at::kDouble);
  const at::Tensor alpha = std::get<0>(biased.sort(1, /*descending=*/true)).select(1, chosen);
  const double rank = static_cast<double>(scores_NE.size(0) * chosen) / static_cast<double>(scores_NE.size(1));
  return (biased - alpha.unsqueeze(1)).clamp_min(0).sum().item<double>() +
         static_cast<double>(chosen) * alpha.sum().item<double>() - rank * bias_E.to(at::kDouble).sum().item<double>();
}

void run_optimum(Case& test) {
  const at::Tensor scores = test.f32("scores");
  const int64_t chosen = num_chosen(test);
  const double optimum = test.tensor("out.optimum").item<double>(), tolerance = test.tolerance("objective");
  at::Tensor bias = at::zeros({scores.size(1)}, scores.options());
  for (int step = 0; step < 200; ++step) {
    bias = centred(exact_quantile(scores, choose(scores, bias, chosen).cutoff_N, chosen));
  }
  const double reached = dual_objective(scores, bias, chosen);
  const double listed = dual_objective(scores, test.f32("out.b_alternating_200"), chosen);
  test.expect("dual after 200 exact updates", std::abs(reached - listed) <= tolerance,
              std::to_string(reached) + " against " + std::to_string(listed));
  // The histogram rule cannot go below the optimum either, and ends near it: one bin per assignment at most.
  at::Tensor binned = at::zeros({scores.size(1)}, scores.options());
  QuantileBalancer balancer(scores.size(1), chosen, 4000);
  double lowest = INFINITY;
  for (int step = 0; step < 200; ++step) {
    balancer.observe(scores, choose(scores, binned, chosen).cutoff_N, binned, scores.size(0));
    test.expect("update", balancer.update(binned));
    lowest = std::min(lowest, dual_objective(scores, binned, chosen));
  }
  test.expect("dual of the histogram rule", lowest >= optimum - 1e-5 && lowest <= optimum * 1.01,
              std::to_string(lowest) + " against the optimum " + std::to_string(optimum));
}

FURLONG_GOLDEN("quantile_balance.exact", run_exact);
FURLONG_GOLDEN("quantile_balance.report", run_report);
FURLONG_GOLDEN("quantile_balance.ties", run_ties);
FURLONG_GOLDEN("quantile_balance.lp", run_optimum);

}  // namespace
}  // namespace furlong::golden
