// kda_chunk, kda_step_ and their floors in one run.
//   kda_bench                     GFLOP/s by 6 T d^2 + 3 T C d + T C^2 a head with C = 64 (gradient: twice that more)
// Counters: GFLOP/s; ratio to an fp32 product of 1024^3 on as many threads; GB/s of the bytes that must move once.

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>

#include <chrono>

#include "furlong/ops/kda/kda.h"
#include "furlong/ops/norm/norm.h"

namespace furlong {
namespace {

struct Inputs {
  at::Tensor q, k, v, decay_log, beta;
  SequenceLayout layout;

  Inputs(int64_t sequences, int64_t tokens, int64_t heads, int64_t d, at::ScalarType dtype)
      : layout(SequenceLayout::from_lengths(std::vector<int64_t>(sequences, tokens))) {
    const int64_t n = sequences * tokens;
    q = l2_norm(at::randn({n, heads, d})).to(dtype);
    k = l2_norm(at::randn({n, heads, d})).to(dtype);
    v = at::randn({n, heads, d}).to(dtype);
    decay_log = at::rand({n, heads, d}) * -5.0;
    beta = at::rand({n, heads});
  }
};

double flops_of(double tokens, double heads, double d) {
  constexpr double chunk = 64;
  return heads * tokens * (6 * d * d + 3 * chunk * d + chunk * chunk);
}

/// Seconds of one fp32 product of 1024^3, the best of three.
double product_flops_per_second() {
  static const double rate = [] {
    const at::Tensor a = at::randn({1024, 1024}), b = at::randn({1024, 1024});
    double best = 1e9;
    for (int i = 0; i < 4; ++i) {
      const auto start = std::chrono::steady_clock::now();
      benchmark::DoNotOptimize(at::mm(a, b));
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return 2.0 * 1024 * 1024 * 1024 / best;
  }();
  return rate;
}

void report(benchmark::State& state, double flops, double bytes) {
  const double iterations = static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] = benchmark::Counter(flops * iterations / 1e9, benchmark::Counter::kIsRate);
  state.counters["of_sgemm"] =
      benchmark::Counter(flops * iterations / product_flops_per_second(), benchmark::Counter::kIsRate);
  state.counters["floor_GB/s"] = benchmark::Counter(bytes * iterations / 1e9, benchmark::Counter::kIsRate);
}

// Arguments: sequences, tokens each, heads, head size, bf16.
void Forward(benchmark::State& state) {
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = state.range(4) != 0 ? at::kBFloat16 : at::kFloat;
  const Inputs in(state.range(0), state.range(1), state.range(2), state.range(3), dtype);
  product_flops_per_second();
  for (auto _ : state) {
    benchmark::DoNotOptimize(kda_chunk(in.q, in.k, in.v, in.decay_log, in.beta, in.layout, {}, 0.1));
  }
  const double elements = static_cast<double>(in.q.numel());
  report(state, flops_of(in.q.size(0), in.q.size(1), in.q.size(2)),
         elements * (4.0 * static_cast<double>(in.q.element_size()) + 4));
}

void ForwardBackward(benchmark::State& state) {
  const at::ScalarType dtype = state.range(4) != 0 ? at::kBFloat16 : at::kFloat;
  Inputs in(state.range(0), state.range(1), state.range(2), state.range(3), dtype);
  for (at::Tensor* leaf : {&in.q, &in.k, &in.v, &in.decay_log, &in.beta}) leaf->requires_grad_();
  const at::Tensor d_out = at::randn(in.v.sizes()).to(dtype);
  product_flops_per_second();
  for (auto _ : state) {
    kda_chunk(in.q, in.k, in.v, in.decay_log, in.beta, in.layout, {}, 0.1).out_NHV.backward(d_out);
    for (at::Tensor* leaf : {&in.q, &in.k, &in.v, &in.decay_log, &in.beta}) leaf->mutable_grad() = at::Tensor();
  }
  const double elements = static_cast<double>(in.q.numel());
  report(state, 3 * flops_of(in.q.size(0), in.q.size(1), in.q.size(2)),
         3 * elements * (4.0 * static_cast<double>(in.q.element_size()) + 4));
}

void Step(benchmark::State& state) {
  const at::NoGradGuard no_grad;
  const Inputs in(state.range(0), 1, state.range(2), state.range(3), at::kFloat);
  at::Tensor pool = at::zeros({state.range(0), state.range(2), state.range(3), state.range(3)});
  const at::Tensor slots = at::arange(state.range(0), at::kLong);
  for (auto _ : state) {
    benchmark::DoNotOptimize(kda_step_(in.q, in.k, in.v, in.decay_log, in.beta, pool, slots, 0.1));
  }
  report(state, 7.0 * static_cast<double>(pool.numel()), 8.0 * static_cast<double>(pool.numel()));
}

BENCHMARK(Forward)
    ->Args({16, 256, 4, 64, 0})
    ->Args({16, 256, 4, 64, 1})
    ->Args({1, 4096, 1, 128, 0})
    ->Args({1, 2048, 8, 128, 1})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(ForwardBackward)
    ->Args({16, 256, 4, 64, 0})
    ->Args({16, 256, 4, 64, 1})
    ->Args({1, 2048, 8, 128, 0})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(Step)->Args({1, 1, 32, 128, 0})->Args({16, 1, 32, 128, 0})->Unit(benchmark::kMicrosecond)->UseRealTime();

}  // namespace
}  // namespace furlong

BENCHMARK_MAIN();
