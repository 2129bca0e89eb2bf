// Gated activations at N = 4096, I = 1024, against a copy and the reference in tensor operations.
//   build/cpu/bin/situ_bench --benchmark_min_time=0.2

#include <ATen/core/grad_mode.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <benchmark/benchmark.h>

#include "furlong/ops/situ/reference.h"
#include "furlong/ops/situ/situ.h"

namespace furlong {
namespace {

at::Tensor make(const benchmark::State& state) {
  return at::randn({4096, 1024}).to(state.range(0) == 0 ? at::kFloat : at::kBFloat16);
}

template <typename Op>
void measure_forward(benchmark::State& state, const Op& op) {
  const at::NoGradGuard no_grad;
  const at::Tensor gate = make(state);
  const at::Tensor up = make(state);
  for (auto _ : state) benchmark::DoNotOptimize(op(gate, up));
  state.SetBytesProcessed(state.iterations() * 3 * gate.numel() * gate.element_size());
}

template <typename Op>
void measure_backward(benchmark::State& state, const Op& op) {
  at::Tensor gate = make(state).requires_grad_();
  at::Tensor up = make(state).requires_grad_();
  const at::Tensor dy = at::ones_like(gate);
  for (auto _ : state) {
    op(gate, up).backward(dy);
    gate.mutable_grad().reset();
    up.mutable_grad().reset();
  }
  state.SetBytesProcessed(state.iterations() * 8 * gate.numel() * gate.element_size());
}

at::Tensor situ(const at::Tensor& gate, const at::Tensor& up) {
  return situ_glu(gate, up, 4.0, 25.0);
}
at::Tensor situ_reference(const at::Tensor& gate, const at::Tensor& up) {
  return situ_glu_reference(gate, up, 4.0, 25.0);
}

void BM_Copy(benchmark::State& state) {
  const at::Tensor x = make(state);
  at::Tensor y = at::empty_like(x);
  for (auto _ : state) y.copy_(x);
  state.SetBytesProcessed(state.iterations() * 2 * x.numel() * x.element_size());
}

void BM_SituGlu(benchmark::State& state) {
  measure_forward(state, situ);
}
void BM_SituGluReference(benchmark::State& state) {
  measure_forward(state, situ_reference);
}
void BM_SituGluForwardBackward(benchmark::State& state) {
  measure_backward(state, situ);
}
void BM_SituGluReferenceForwardBackward(benchmark::State& state) {
  measure_backward(state, situ_reference);
}
void BM_Swiglu(benchmark::State& state) {
  measure_forward(state, swiglu);
}
void BM_SwigluForwardBackward(benchmark::State& state) {
  measure_backward(state, swiglu);
}

BENCHMARK(BM_Copy)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_SituGlu)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_SituGluReference)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_SituGluForwardBackward)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_SituGluReferenceForwardBackward)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_Swiglu)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_SwigluForwardBackward)->Arg(0)->Arg(1)->UseRealTime();

}  // namespace
}  // namespace furlong

BENCHMARK_MAIN();
