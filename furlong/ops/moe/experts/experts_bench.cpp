// moe_experts at the shape of training on a small machine: N 4096, A 4, E 32, I 96. FLOPs: 6 P L I forward, twice that
// backward; "rate" counts them alone.

#include "furlong/ops/moe/experts/experts.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <benchmark/benchmark.h>

namespace furlong {
namespace {

constexpr int64_t kTokens = 4096, kChosen = 4, kExperts = 32, kExpertSize = 96;
const Activation kSitu{Activation::Kind::kSitu, 4.0, 25.0};

struct Inputs {
  at::Tensor z, ids, weights, w1, w3, w2;
  Inputs(int64_t width, at::ScalarType dtype)
      : z(at::randn({kTokens, width}).to(dtype)),
        ids(at::randint(kExperts, {kTokens, kChosen}, at::kLong)),
        weights(at::rand({kTokens, kChosen})),
        w1(at::randn({kExperts, kExpertSize, width}) * 0.1),
        w3(at::randn({kExperts, kExpertSize, width}) * 0.1),
        w2(at::randn({kExperts, width, kExpertSize}) * 0.1) {}
  at::Tensor run() const { return moe_experts(z, ids, weights, w1, w3, w2, kSitu); }
};

at::ScalarType dtype_of(const benchmark::State& state) {
  return state.range(1) != 0 ? at::kBFloat16 : at::kFloat;
}

void set_rate(benchmark::State& state, double passes) {
  const double flops = passes * 6.0 * kTokens * kChosen * static_cast<double>(state.range(0)) * kExpertSize;
  state.counters["rate"] = benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
}

void forward(benchmark::State& state) {
  const at::NoGradGuard no_grad;
  const Inputs in(state.range(0), dtype_of(state));
  for (auto _ : state) benchmark::DoNotOptimize(in.run());
  set_rate(state, 1);
}

void forward_backward(benchmark::State& state) {
  Inputs in(state.range(0), dtype_of(state));
  for (at::Tensor* x : {&in.z, &in.weights, &in.w1, &in.w3, &in.w2}) x->set_requires_grad(true);
  const at::Tensor cotangent = at::randn({kTokens, state.range(0)}).to(dtype_of(state));
  for (auto _ : state) in.run().backward(cotangent);
  set_rate(state, 3);
}

/// The floor: the forward's products as three library calls over all pairs at once.
void dense_products(benchmark::State& state) {
  const at::NoGradGuard no_grad;
  const at::Tensor z = at::randn({kTokens * kChosen, state.range(0)}).to(dtype_of(state));
  const at::Tensor w1 = at::randn({state.range(0), kExpertSize}).to(dtype_of(state)), w2 = w1.t().contiguous();
  for (auto _ : state) {
    benchmark::DoNotOptimize(at::mm(z, w1));
    benchmark::DoNotOptimize(at::mm(at::mm(z, w1), w2));
  }
  set_rate(state, 1);
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"L", "bf16"})->ArgsProduct({{128, 256}, {0, 1}})->Unit(benchmark::kMillisecond)->UseRealTime();
}

BENCHMARK(forward)->Apply(shapes);
BENCHMARK(forward_backward)->Apply(shapes);
BENCHMARK(dense_products)->Apply(shapes);

}  // namespace
}  // namespace furlong

BENCHMARK_MAIN();
