// The read of 9 sources at N = 4096, D = 256, against the reference in tensor operations.
//   build/cpu/bin/attnres_bench --benchmark_min_time=0.2

#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <benchmark/benchmark.h>

#include "furlong/ops/attnres/attnres.h"
#include "furlong/ops/attnres/reference.h"

namespace furlong {
namespace {

constexpr int64_t kSources = 9;

using Read = std::tuple<at::Tensor, at::Tensor> (*)(at::TensorList, const at::Tensor&, double);

std::vector<at::Tensor> make_sources(const benchmark::State& state, bool requires_grad) {
  std::vector<at::Tensor> sources;
  for (int64_t s = 0; s < kSources; ++s) {
    const at::Tensor source = at::randn({4096, 256}).to(state.range(0) == 0 ? at::kFloat : at::kBFloat16);
    sources.push_back(source.set_requires_grad(requires_grad));
  }
  return sources;
}

// Floor: every source read once, the result written once.
void measure_forward(benchmark::State& state, Read read) {
  const std::vector<at::Tensor> sources = make_sources(state, false);
  const at::Tensor w = at::randn({256});
  for (auto _ : state) benchmark::DoNotOptimize(read(sources, w, 1e-5));
  state.SetBytesProcessed(state.iterations() * (kSources + 1) * sources[0].numel() * sources[0].element_size());
}

// Floor: the forward, then every source and dout read once and every gradient written once.
void measure_backward(benchmark::State& state, Read read) {
  std::vector<at::Tensor> sources = make_sources(state, true);
  at::Tensor w = at::randn({256}).requires_grad_();
  const at::Tensor dout = at::ones_like(sources[0]);
  for (auto _ : state) {
    std::get<0>(read(sources, w, 1e-5)).backward(dout);
    for (at::Tensor& source : sources) source.mutable_grad().reset();
    w.mutable_grad().reset();
  }
  state.SetBytesProcessed(state.iterations() * (3 * kSources + 2) * sources[0].numel() * sources[0].element_size());
}

void BM_Read(benchmark::State& state) {
  measure_forward(state, attnres_read);
}
void BM_ReadReference(benchmark::State& state) {
  measure_forward(state, attnres_read_reference);
}
void BM_ReadForwardBackward(benchmark::State& state) {
  measure_backward(state, attnres_read);
}
void BM_ReadReferenceForwardBackward(benchmark::State& state) {
  measure_backward(state, attnres_read_reference);
}

BENCHMARK(BM_Read)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_ReadReference)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_ReadForwardBackward)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_ReadReferenceForwardBackward)->Arg(0)->Arg(1)->UseRealTime();

}  // namespace
}  // namespace furlong

BENCHMARK_MAIN();
