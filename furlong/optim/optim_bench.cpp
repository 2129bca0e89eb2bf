// What an optimizer step costs: the mixture-of-experts matrices of a small model through Muon, its other parameters
// through AdamW, and clipping. Reported beside each: the rate of Newton-Schulz products, or bytes moved.

#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>

#include <deque>
#include <string>
#include <vector>

#include "furlong/optim/muon.h"
#include "furlong/optim/newton_schulz.h"
#include "furlong/optim/optimizer.h"

namespace furlong {
namespace {

constexpr int64_t kLayers = 7;
constexpr int64_t kExperts = 32;
constexpr int64_t kInner = 96;
constexpr int64_t kLatent = 192;

struct Model {
  std::deque<at::Tensor> tensors;
  std::vector<Param> params;

  void add(const std::string& name, std::vector<int64_t> shape, OptimizerRule rule, int64_t blocks) {
    at::Tensor& tensor = tensors.emplace_back(at::randn(shape).mul_(0.02).requires_grad_(true));
    tensor.mutable_grad() = at::randn(shape);
    ParamSpec spec;
    spec.name = name;
    spec.shape = shape;
    spec.rule = rule;
    spec.muon_blocks = blocks;
    params.push_back({spec, &tensor});
  }
};

Model expert_model() {
  Model model;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = std::to_string(layer) + ".";
    model.add(prefix + "w1", {kExperts, kInner, kLatent}, OptimizerRule::kMuon, kExperts);
    model.add(prefix + "w3", {kExperts, kInner, kLatent}, OptimizerRule::kMuon, kExperts);
    model.add(prefix + "w2", {kExperts, kLatent, kInner}, OptimizerRule::kMuon, kExperts);
  }
  return model;
}

double newton_schulz_flops(int64_t blocks, int64_t steps) {
  const double r = kInner;
  const double c = kLatent;
  return static_cast<double>(blocks * steps) * (2 * r * r * c + 2 * r * r * r + 2 * r * r * c);
}

void optimizer_step(benchmark::State& state, bool bf16) {
  Model model = expert_model();
  OptimizerConfig config;
  config.muon.bf16 = bf16;
  Optimizer optimizer(model.params, config);
  for (auto _ : state) optimizer.step(1e-3);
  state.counters["GFLOP/s"] = benchmark::Counter(newton_schulz_flops(kLayers * kExperts * 3, 5) * 1e-9,
                                                 benchmark::Counter::kIsIterationInvariantRate);
}

void muon_bf16(benchmark::State& state) {
  optimizer_step(state, true);
}

void muon_fp32(benchmark::State& state) {
  optimizer_step(state, false);
}

/// The same with the passes around Newton-Schulz in plain tensor operations and no chunks.
void muon_bf16_reference(benchmark::State& state) {
  Model model = expert_model();
  std::vector<MuonParam> params;
  for (const Param& param : model.params) {
    params.push_back(
        {param.tensor->detach(), param.tensor->grad(), at::zeros(param.tensor->sizes()), param.spec.muon_blocks, true});
  }
  for (auto _ : state) muon_step_reference(params, {}, 1e-3);
}

/// Newton-Schulz alone, on batches of state.range(0).
void products_bf16(benchmark::State& state) {
  const int64_t batch = state.range(0);
  NewtonSchulzBuffers buffers(batch, kInner, kLatent, at::TensorOptions(at::kBFloat16));
  for (auto _ : state) {
    buffers.x_BRC.fill_(0.01);
    benchmark::DoNotOptimize(newton_schulz_(buffers, batch, 5));
  }
  state.counters["GFLOP/s"] =
      benchmark::Counter(newton_schulz_flops(batch, 5) * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

void adamw(benchmark::State& state) {
  Model model;
  for (int64_t i = 0; i < 8; ++i) model.add(std::to_string(i), {1 << 20}, OptimizerRule::kAdamW, 1);
  Optimizer optimizer(model.params, {});
  for (auto _ : state) optimizer.step(1e-3);
  state.SetBytesProcessed(state.iterations() * (8 << 20) * 28);  // reads w, g, m, v; writes w, m, v
}

void clip(benchmark::State& state) {
  Model model;
  for (int64_t i = 0; i < 8; ++i) model.add(std::to_string(i), {1 << 20}, OptimizerRule::kAdamW, 1);
  for (auto _ : state) benchmark::DoNotOptimize(clip_grad_norm(model.params, 0.0));
  state.SetBytesProcessed(state.iterations() * (8 << 20) * 4);
}

BENCHMARK(muon_bf16)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(muon_bf16_reference)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(muon_fp32)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(products_bf16)
    ->Arg(8)
    ->Arg(16)
    ->Arg(32)
    ->Arg(64)
    ->Arg(128)
    ->Arg(224)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(adamw)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(clip)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace furlong

BENCHMARK_MAIN();
