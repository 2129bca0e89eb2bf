// Loss and both gradients at N = 4096, D = 256, V = 8192, against the reference with the whole matrix of logits, and
// against the three matrix products alone.
//   build/cpu/bin/cross_entropy_bench --benchmark_min_time=0.5

#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <benchmark/benchmark.h>

#include "furlong/ops/cross_entropy/cross_entropy.h"
#include "furlong/ops/cross_entropy/reference.h"

namespace furlong {
namespace {

constexpr int64_t kTokens = 4096, kHidden = 256, kVocabulary = 8192;

using Loss = std::tuple<at::Tensor, at::Tensor> (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                    const at::Tensor&);

at::ScalarType dtype_of(const benchmark::State& state) {
  return state.range(0) == 0 ? at::kFloat : at::kBFloat16;
}

void set_flops(benchmark::State& state, int64_t products) {
  const double flops = 2.0 * static_cast<double>(products) * kTokens * kHidden * kVocabulary;
  state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

void measure(benchmark::State& state, Loss loss, bool gradient) {
  at::Tensor hidden = at::randn({kTokens, kHidden}).to(dtype_of(state)).set_requires_grad(gradient);
  at::Tensor head = (at::randn({kVocabulary, kHidden}) * 0.05).set_requires_grad(gradient);
  const at::Tensor targets = at::randint(kVocabulary, {kTokens}, at::kLong);
  const at::Tensor weight = at::ones({kTokens});
  for (auto _ : state) {
    const at::Tensor value = std::get<0>(loss(hidden, head, targets, weight));
    if (!gradient) continue;
    value.backward();
    hidden.mutable_grad().reset();
    head.mutable_grad().reset();
  }
  set_flops(state, gradient ? 3 : 1);
}

void BM_Loss(benchmark::State& state) {
  measure(state, linear_cross_entropy, false);
}
void BM_LossReference(benchmark::State& state) {
  measure(state, linear_cross_entropy_reference, false);
}
void BM_LossAndGradients(benchmark::State& state) {
  measure(state, linear_cross_entropy, true);
}
void BM_LossAndGradientsReference(benchmark::State& state) {
  measure(state, linear_cross_entropy_reference, true);
}

void BM_ProductsAlone(benchmark::State& state) {
  const at::Tensor hidden = at::randn({kTokens, kHidden}).to(dtype_of(state));
  const at::Tensor head = at::randn({kVocabulary, kHidden}).to(dtype_of(state));
  for (auto _ : state) {
    const at::Tensor logits = at::mm(hidden, head.t());
    benchmark::DoNotOptimize(at::mm(logits, head));
    benchmark::DoNotOptimize(at::mm(logits.t(), hidden));
  }
  set_flops(state, 3);
}

BENCHMARK(BM_Loss)->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(BM_LossReference)->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(BM_LossAndGradients)->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(BM_LossAndGradientsReference)->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(BM_ProductsAlone)->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace furlong

BENCHMARK_MAIN();
