// Load balance from a dead-expert start: quantile balancing beside no balancing and the sign rule, on the toy router of
// skewed_router.h. Prints one row a balancer; worst and mean over the seeds. Arguments: experts chosen tokens skew
// seeds.

#include <ATen/ops/sign.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "tests/support/skewed_router.h"

namespace furlong {
namespace {

constexpr int64_t kSteps = 20;
constexpr int64_t kLateFrom = 10;

/// Changes the bias after a step.
using Balancer = std::function<void(const SkewedRouter&, const RouteOutput&, at::Tensor& bias_E)>;

Balancer quantile_balancer(int64_t num_experts, int64_t num_chosen, int64_t bins) {
  auto balancer = std::make_shared<QuantileBalancer>(num_experts, num_chosen, bins);
  return [balancer](const SkewedRouter& router, const RouteOutput& out, at::Tensor& bias_E) {
    balancer->observe(out.scores_NE, out.cutoff_N, bias_E, router.tokens);
    balancer->update(bias_E);
  };
}

/// The loss-free rule: a fixed step towards the mean load.
Balancer sign_rule(double step) {
  return [step](const SkewedRouter& router, const RouteOutput& out, at::Tensor& bias_E) {
    const at::Tensor load = router.load(out).to(at::kFloat);
    bias_E.add_((load.mean() - load).sign(), step);
  };
}

struct Outcome {
  double fifth_worst = 0, late_mean = 0, late_worst = 0;
};

Outcome run(SkewedRouter router, int64_t seeds, const std::function<Balancer()>& make) {
  Outcome outcome;
  for (int64_t seed = 1; seed <= seeds; ++seed) {
    router.seed = static_cast<uint64_t>(seed);
    const Balancer balance = make();
    at::Tensor bias_E = at::zeros({router.num_experts});
    bias_E.narrow(0, 0, router.num_experts / 8).fill_(-2.0);  // an eighth of the experts are dead
    double late = 0;
    for (int64_t step = 0; step < kSteps; ++step) {
      const RouteOutput out = router.route(step, bias_E);
      const double violation = max_violation(router.load(out));
      if (step == 5) outcome.fifth_worst = std::max(outcome.fifth_worst, violation);
      if (step >= kLateFrom) late += violation / static_cast<double>(kSteps - kLateFrom);
      balance(router, out, bias_E);
    }
    outcome.late_mean += late / static_cast<double>(seeds);
    outcome.late_worst = std::max(outcome.late_worst, late);
  }
  return outcome;
}

void print_row(const char* name, const Outcome& outcome) {
  std::printf("%-22s %12.3f %12.3f %12.3f\n", name, outcome.fifth_worst, outcome.late_mean, outcome.late_worst);
}

void time_observe(const SkewedRouter& router) {
  const RouteOutput out = router.route(0, at::zeros({router.num_experts}));
  QuantileBalancer balancer(router.num_experts, router.num_chosen);
  at::Tensor bias_E = at::zeros({router.num_experts});
  double best = 1e9;
  for (int repeat = 0; repeat < 20; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    balancer.observe(out.scores_NE, out.cutoff_N, bias_E, router.tokens);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::printf("observe: %.3f ms, %.2f ns a score\n", best * 1e3,
              best * 1e9 / static_cast<double>(router.tokens * router.num_experts));
}

int64_t argument(int argc, char** argv, int place, int64_t otherwise) {
  return argc > place ? std::atoll(argv[place]) : otherwise;
}

}  // namespace
}  // namespace furlong

int main(int argc, char** argv) {
  using namespace furlong;
  const SkewedRouter router{argument(argc, argv, 1, 64), argument(argc, argv, 2, 4), argument(argc, argv, 3, 8192),
                            argc > 4 ? std::atof(argv[4]) : 1.0, 1};
  const int64_t seeds = argument(argc, argv, 5, 8);
  const int64_t experts = router.num_experts, chosen = router.num_chosen;
  std::printf("experts %ld, chosen %ld, tokens %ld, skew %.1f, seeds %ld; noise floor %.3f\n", experts, chosen,
              router.tokens, router.skew, seeds, router.noise_floor());
  std::printf("%-22s %12s %12s %12s\n", "MaxVio", "step 5 worst", "late mean", "late worst");
  print_row("none", run(router, seeds, [] { return [](auto&&...) {}; }));
  print_row("sign rule, 0.01", run(router, seeds, [] { return sign_rule(0.01); }));
  print_row("sign rule, 0.001", run(router, seeds, [] { return sign_rule(0.001); }));
  print_row("quantile, 100 bins", run(router, seeds, [&] { return quantile_balancer(experts, chosen, 100); }));
  print_row("quantile, 1000 bins", run(router, seeds, [&] { return quantile_balancer(experts, chosen, 1000); }));
  time_observe(router);
  return 0;
}
