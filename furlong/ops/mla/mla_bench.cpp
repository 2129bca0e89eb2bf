// mla_attention at training lengths, padded against the library's own choice, and absorbed decode against its byte
// floor: the cache is read once.

#include "furlong/ops/mla/mla.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <benchmark/benchmark.h>

namespace furlong {
namespace {

constexpr int64_t kHeads = 4, kKey = 48, kValue = 32, kTokens = 4096;

/// `padded` 1: mla_attention. 0: the library called with a narrower v, which takes whole score matrices.
void training(benchmark::State& state) {
  const int64_t length = state.range(0), batch = kTokens / length;
  const auto layout = SequenceLayout::from_lengths(std::vector<int64_t>(batch, length));
  const at::Tensor q = at::randn({kTokens, kHeads, kKey}).requires_grad_(), k = at::randn({kTokens, kHeads, kKey});
  const at::Tensor v = at::randn({kTokens, kHeads, kValue}), cotangent = at::randn({kTokens, kHeads, kValue});
  const auto split = [&](const at::Tensor& x) { return x.view({batch, length, kHeads, -1}).transpose(1, 2); };
  for (auto _ : state) {
    if (state.range(1) != 0) {
      mla_attention(q, k, v, layout, 0.14).backward(cotangent);
    } else {
      at::scaled_dot_product_attention(split(q), split(k), split(v), {}, 0.0, true, 0.14).backward(split(cotangent));
    }
  }
}

void decode(benchmark::State& state) {
  const at::NoGradGuard no_grad;
  const int64_t heads = state.range(0), length = state.range(1);
  const auto dtype = state.range(2) != 0 ? at::kBFloat16 : at::kFloat;
  const at::Tensor cache = at::randn({1, length, 576}).to(dtype), q = at::randn({1, heads, 576}).to(dtype);
  const auto layout = SequenceLayout::with_state({1}, {0}, {length - 1});
  for (auto _ : state) benchmark::DoNotOptimize(mla_absorbed(q, cache, layout, 512, 0.07));
  state.SetBytesProcessed(state.iterations() * cache.numel() * static_cast<int64_t>(cache.element_size()));
  state.counters["rate"] =
      benchmark::Counter(2.0 * heads * length * (576 + 512), benchmark::Counter::kIsIterationInvariantRate);
}

BENCHMARK(training)
    ->ArgNames({"T", "padded"})
    ->ArgsProduct({{64, 256, 1024, 4096}, {0, 1}})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(decode)
    ->ArgNames({"H", "C", "bf16"})
    ->ArgsProduct({{8, 32, 96}, {4096, 32768}, {0, 1}})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
}  // namespace furlong

BENCHMARK_MAIN();
