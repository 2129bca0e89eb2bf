// MXFP4 expert products at the sizes of Kimi K3 (I 3584, O 3072) beside what this machine can do, in one run: the read
// rate of its memory, and dequantising each group followed by the library's product. "bytes" counts packed codes and
// scales once each; matrices together are larger than the last-level cache, so every pass reads memory.
//   OMP_NUM_THREADS=2 build/cpu/bin/mxfp4_bench --benchmark_repetitions=20 --benchmark_min_time=0.02
//     --benchmark_enable_random_interleaving=true --benchmark_report_aggregates_only=true
// "min" is the time of the least disturbed repetition, for machines that are not quiet (its rates are the worst ones).

#include "furlong/ops/mxfp4/mxfp4.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <benchmark/benchmark.h>
#include <malloc.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "furlong/base/parallel.h"

namespace furlong {
namespace {

constexpr int64_t kGroups = 16, kOutputs = 3072, kInputs = 3584;
constexpr int64_t kBytesOfGroup = kOutputs * (kInputs / 2 + kInputs / kMxBlock);

struct Experts {
  std::vector<at::Tensor> packed, scale;

  Experts() {
    for (int64_t group = 0; group < kGroups; ++group) {
      packed.push_back(at::randint(256, {kOutputs, kInputs / 2}, at::kByte));
      scale.push_back(at::randint(110, 124, {kOutputs, kInputs / kMxBlock}, at::kByte));
    }
  }
};

const Experts& experts() {
  static const Experts all;
  return all;
}

at::ScalarType dtype_of(const benchmark::State& state) {
  return state.range(1) != 0 ? at::kBFloat16 : at::kFloat;
}

void set_rates(benchmark::State& state) {
  state.SetBytesProcessed(state.iterations() * kGroups * kBytesOfGroup);
  const double flops = 2.0 * static_cast<double>(kGroups * state.range(0) * kOutputs * kInputs);
  state.counters["flops"] = benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
}

/// Every byte of as much memory as all groups take, summed in eight lanes of 64 bits by each thread.
void read_memory(benchmark::State& state) {
  const at::Tensor memory = at::randint(256, {kGroups * kBytesOfGroup}, at::kByte);
  const char* data = static_cast<const char*>(memory.const_data_ptr());
  for (auto _ : state) {
    parallel_for(0, memory.numel() / 64, 1, [&](int64_t first, int64_t last) {
      uint64_t sums[8] = {};
      for (int64_t line = first; line < last; ++line) {
        uint64_t words[8];
        std::memcpy(words, data + line * 64, sizeof(words));
        for (int lane = 0; lane < 8; ++lane) sums[lane] += words[lane];
      }
      benchmark::DoNotOptimize(sums);
    });
  }
  state.SetBytesProcessed(state.iterations() * memory.numel());
}

void packed_product(benchmark::State& state) {
  const at::NoGradGuard no_grad;
  const int64_t rows = state.range(0);
  const at::Tensor x = at::randn({kGroups * rows, kInputs}).to(dtype_of(state));
  const at::Tensor offsets = at::arange(0, kGroups * rows + 1, rows, at::kLong);
  const Experts& all = experts();
  for (auto _ : state) benchmark::DoNotOptimize(mxfp4_grouped_linear(x, all.packed, all.scale, offsets));
  set_rates(state);
}

void dequantize_and_library(benchmark::State& state) {
  const at::NoGradGuard no_grad;
  const int64_t rows = state.range(0);
  const at::Tensor x = at::randn({kGroups * rows, kInputs}).to(dtype_of(state));
  at::Tensor y = at::empty({kGroups * rows, kOutputs}, x.options());
  for (auto _ : state) {
    for (int64_t group = 0; group < kGroups; ++group) {
      const at::Tensor weight = mxfp4_dequantize(experts().packed[group], experts().scale[group], x.scalar_type());
      at::Tensor out = y.narrow(0, group * rows, rows);
      at::mm_out(out, x.narrow(0, group * rows, rows), weight.t());
    }
  }
  set_rates(state);
}

/// The library's product alone, on matrices that were dequantised before: 16 bits a weight instead of 4.25.
void library_product(benchmark::State& state) {
  const at::NoGradGuard no_grad;
  const int64_t rows = state.range(0);
  const at::Tensor x = at::randn({kGroups * rows, kInputs}).to(dtype_of(state));
  at::Tensor y = at::empty({kGroups * rows, kOutputs}, x.options());
  std::vector<at::Tensor> weights;
  for (int64_t group = 0; group < kGroups; ++group) {
    weights.push_back(mxfp4_dequantize(experts().packed[group], experts().scale[group], x.scalar_type()));
  }
  for (auto _ : state) {
    for (int64_t group = 0; group < kGroups; ++group) {
      at::Tensor out = y.narrow(0, group * rows, rows);
      at::mm_out(out, x.narrow(0, group * rows, rows), weights[group].t());
    }
  }
  set_rates(state);
}

void dequantize(benchmark::State& state) {
  for (auto _ : state) {
    for (int64_t group = 0; group < kGroups; ++group) {
      benchmark::DoNotOptimize(mxfp4_dequantize(experts().packed[group], experts().scale[group], dtype_of(state)));
    }
  }
  state.SetBytesProcessed(state.iterations() * kGroups * kBytesOfGroup);
}

double least(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}

void common(benchmark::internal::Benchmark* bench) {
  bench->Unit(benchmark::kMillisecond)->UseRealTime()->ComputeStatistics("min", least);
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "bf16"})->ArgsProduct({{1, 4, 16, 32, 256}, {0, 1}});
  common(bench);
}

BENCHMARK(read_memory)->Apply(common);
BENCHMARK(packed_product)->Apply(shapes);
BENCHMARK(dequantize_and_library)->Apply(shapes);
BENCHMARK(library_product)->Apply(shapes);
BENCHMARK(dequantize)->ArgNames({"rows", "bf16"})->ArgsProduct({{0}, {0, 1}})->Apply(common);

}  // namespace
}  // namespace furlong

int main(int argc, char** argv) {
  // Freed memory stays with the process: page faults of fresh matrices would slow the baselines more than their work.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
