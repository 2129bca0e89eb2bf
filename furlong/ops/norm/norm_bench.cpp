// Norms at the training shape, against a copy of the same bytes and the reference in tensor operations.
//   build/cpu/bin/norm_bench --benchmark_min_time=0.2

#include <ATen/core/grad_mode.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <benchmark/benchmark.h>

#include "furlong/ops/norm/norm.h"
#include "furlong/ops/norm/reference.h"

namespace furlong {
namespace {

constexpr int64_t kTokens = 4096;
constexpr int64_t kHidden = 256;

at::ScalarType dtype_of(const benchmark::State& state) {
  return state.range(0) == 0 ? at::kFloat : at::kBFloat16;
}

/// `passes` = how often an [N, D] tensor must be read or written: the byte floor.
template <typename Op>
void measure_forward(benchmark::State& state, int64_t passes, const Op& op) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::randn({kTokens, kHidden}).to(dtype_of(state));
  const at::Tensor weight = at::ones({kHidden});
  for (auto _ : state) benchmark::DoNotOptimize(op(x, weight));
  state.SetBytesProcessed(state.iterations() * passes * x.numel() * x.element_size());
}

template <typename Op>
void measure_backward(benchmark::State& state, int64_t passes, const Op& op) {
  at::Tensor x = at::randn({kTokens, kHidden}).to(dtype_of(state)).requires_grad_();
  at::Tensor weight = at::ones({kHidden}).requires_grad_();
  const at::Tensor dy = at::ones_like(x);
  for (auto _ : state) {
    op(x, weight).backward(dy);
    x.mutable_grad().reset();
    weight.mutable_grad().reset();
  }
  state.SetBytesProcessed(state.iterations() * passes * x.numel() * x.element_size());
}

void BM_Copy(benchmark::State& state) {
  const at::Tensor x = at::randn({kTokens, kHidden}).to(dtype_of(state));
  at::Tensor y = at::empty_like(x);
  for (auto _ : state) y.copy_(x);
  state.SetBytesProcessed(state.iterations() * 2 * x.numel() * x.element_size());
}

void BM_RmsNorm(benchmark::State& state) {
  measure_forward(state, 2, [](const at::Tensor& x, const at::Tensor& w) { return rms_norm(x, w, 1e-5); });
}

void BM_RmsNormReference(benchmark::State& state) {
  measure_forward(state, 2, [](const at::Tensor& x, const at::Tensor& w) { return rms_norm_reference(x, w, 1e-5); });
}

void BM_RmsNormForwardBackward(benchmark::State& state) {
  measure_backward(state, 5, [](const at::Tensor& x, const at::Tensor& w) { return rms_norm(x, w, 1e-5); });
}

void BM_RmsNormReferenceForwardBackward(benchmark::State& state) {
  measure_backward(state, 5, [](const at::Tensor& x, const at::Tensor& w) { return rms_norm_reference(x, w, 1e-5); });
}

void BM_GatedRmsNorm(benchmark::State& state) {
  measure_forward(state, 2, [](const at::Tensor& x, const at::Tensor& w) { return gated_rms_norm(x, w, x, 1e-5); });
}

void BM_GatedRmsNormForwardBackward(benchmark::State& state) {
  measure_backward(state, 5, [](const at::Tensor& x, const at::Tensor& w) { return gated_rms_norm(x, w, x, 1e-5); });
}

void BM_L2Norm(benchmark::State& state) {
  measure_forward(state, 2, [](const at::Tensor& x, const at::Tensor&) { return l2_norm(x); });
}

BENCHMARK(BM_Copy)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_RmsNorm)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_RmsNormReference)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_RmsNormForwardBackward)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_RmsNormReferenceForwardBackward)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_GatedRmsNorm)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_GatedRmsNormForwardBackward)->Arg(0)->Arg(1)->UseRealTime();
BENCHMARK(BM_L2Norm)->Arg(0)->Arg(1)->UseRealTime();

}  // namespace
}  // namespace furlong

BENCHMARK_MAIN();
