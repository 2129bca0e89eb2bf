// Checkpoint stores: the checksum against a plain copy, a file written and read back, and a header of many tensors.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "furlong/checkpoint/checksum.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/checkpoint/safetensors_header.h"

namespace furlong {
namespace {

constexpr size_t kBytes = size_t{64} << 20;

void copy_64mib(benchmark::State& state) {
  const std::vector<char> from(kBytes, 1);
  std::vector<char> to(kBytes);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), kBytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kBytes);
}

void checksum_64mib(benchmark::State& state) {
  const std::vector<char> bytes(kBytes, 1);
  for (auto _ : state) benchmark::DoNotOptimize(checksum64(std::as_bytes(std::span(bytes))));
  state.SetBytesProcessed(state.iterations() * kBytes);
}

std::filesystem::path bench_file() {
  return std::filesystem::temp_directory_path() / ("furlong_checkpoint_bench_" + std::to_string(getpid()));
}

void write_64mib(benchmark::State& state) {
  const at::Tensor tensor = at::ones({kBytes / 4});
  for (auto _ : state) write_tensors(bench_file(), {{"t", tensor}});
  state.SetBytesProcessed(state.iterations() * kBytes);
  std::filesystem::remove(bench_file());
}

void read_64mib(benchmark::State& state) {
  write_tensors(bench_file(), {{"t", at::ones({kBytes / 4})}});
  for (auto _ : state) benchmark::DoNotOptimize(CheckpointReader(bench_file()).tensor("t"));
  state.SetBytesProcessed(state.iterations() * kBytes);
  std::filesystem::remove(bench_file());
}

/// A shard of the largest published checkpoint names about 5,200 tensors.
void parse_header_5200(benchmark::State& state) {
  std::string header = "{";
  for (int i = 0; i < 5200; ++i) {
    header += (i > 0 ? "," : "") + std::string("\"language_model.model.layers.17.block_sparse_moe.experts.") +
              std::to_string(i) + ".w1.weight_packed\":{\"dtype\":\"U8\",\"shape\":[2,8],\"data_offsets\":[" +
              std::to_string(16 * i) + "," + std::to_string(16 * i + 16) + "]}";
  }
  header += "}";
  for (auto _ : state) benchmark::DoNotOptimize(parse_safetensors_header(header, 5200 * 16, "bench").tensors.size());
  state.SetBytesProcessed(state.iterations() * header.size());
}

BENCHMARK(copy_64mib)->Unit(benchmark::kMillisecond);
BENCHMARK(checksum_64mib)->Unit(benchmark::kMillisecond);
BENCHMARK(write_64mib)->Unit(benchmark::kMillisecond);
BENCHMARK(read_64mib)->Unit(benchmark::kMillisecond);
BENCHMARK(parse_header_5200)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace furlong

BENCHMARK_MAIN();
