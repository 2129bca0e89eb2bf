// Times the forward of KDA on the GPU; needs no torch.
//   kda_cuda_forward_bench [--samples N] [--shape NAME] [--json FILE] [--kernels HASH]
// bf16, K = V = 128, gate (bounded by -5, bf16 input), L2 norm and beta's sigmoid in the kernel, no initial state,
// final state out. The JSON holds the raw samples in milliseconds and the hash of the kernel sources
// (tools/kernel_hash.sh). FLOPs: 6 T d^2 + 3 T C d + T C^2 a head with C = 64, whatever the kernel does. Byte floor: q,
// k, v, gate and out once in bf16, beta's logit once, the final state once.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "furlong/ops/kda/cuda/test_device.h"

namespace furlong::kda::cuda::test {
namespace {

struct Shape {
  std::string name;
  std::vector<int64_t> lengths;
  int64_t heads;
};

std::vector<Shape> shapes() {
  const std::vector<int64_t> ragged = {1300, 540, 1801, 547, 1024, 982, 271, 1727};  // sum 8192
  return {{"T8192_H96", {8192}, 96},   {"T8192_H32", {8192}, 32},
          {"T65536_H32", {65536}, 32}, {"8x1024_H96", std::vector<int64_t>(8, 1024), 96},
          {"ragged8_H96", ragged, 96}, {"T131072_H8", {131072}, 8},
          {"T1_H96", {1}, 96},         {"T64_H96", {64}, 96},
          {"T512_H96", {512}, 96},     {"T512_H32", {512}, 32},
          {"T2048_H32", {2048}, 32}};
}

__device__ uint32_t hash(uint64_t x) {
  x *= 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  return static_cast<uint32_t>((x ^ (x >> 27)) >> 20);
}

/// Standard normal elements.
__global__ void fill(uint16_t* to, int64_t count, uint64_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const float u = (hash(2 * i + seed * 0x10000000001ull) + 0.5f) * 0x1p-32f;
    const float angle = hash(2 * i + 1 + seed * 0x10000000001ull) * 0x1p-32f;
    const float x = sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * angle);
    to[i] = static_cast<uint16_t>(__float_as_uint(x) >> 16);
  }
}

struct Result {
  std::vector<float> samples;
  double median;
};

Result time_shape(const Shape& shape, int samples) {
  constexpr int64_t d = 128;
  std::vector<int64_t> offsets = {0};
  for (const int64_t length : shape.lengths) offsets.push_back(offsets.back() + length);
  const int64_t tokens = offsets.back(), H = shape.heads, elements = tokens * H * d;
  const Buffer q(elements * 2), k(elements * 2), v(elements * 2), z(elements * 2), beta(tokens * H * 2),
      out(elements * 2), state(shape.lengths.size() * H * d * d * 4);
  uint64_t seed = 1;
  for (const Buffer* buffer : {&q, &k, &v, &z, &beta}) {
    fill<<<2048, 256>>>(buffer->data<uint16_t>(), static_cast<int64_t>(buffer->bytes() / 2), seed++);
  }
  const Buffer a_log = Buffer::of(std::vector<float>(H, 0.0f)), dt_bias = Buffer::of(std::vector<float>(H * d, 0.0f)),
               device_offsets = Buffer::of(offsets);
  ForwardArgs args;
  Inputs& in = args.in;
  const Element bf16 = Element::kBFloat16;
  in.q_NHK = {q.data(), H * d, d, bf16};
  in.k_NHK = {k.data(), H * d, d, bf16};
  in.v_NHV = {v.data(), H * d, d, bf16};
  in.gate_NHK = {z.data(), H * d, d, bf16};
  in.beta_NH = {beta.data(), H, 1, bf16};
  in.gate_form = GateForm::kBounded;
  in.beta_is_logit = in.l2_norm = true;
  in.a_log_H = a_log.data<float>();
  in.dt_bias_HK = dt_bias.data<float>();
  in.scale = 0.08838834764831845f;
  in.offsets = device_offsets.data<int64_t>();
  in.tokens = tokens;
  in.sequences = static_cast<int64_t>(shape.lengths.size());
  in.heads = H;
  in.key_size = in.value_size = d;
  args.out_NHV = out.data();
  args.final_state_SHKV = state.data<float>();
  for (const int64_t length : shape.lengths) {
    args.longest = std::max(args.longest, length);
    args.splits += split_segments(length, H) > 1 ? 1 : 0;
  }
  args.workspace_bytes = forward_workspace_bytes(args);
  const Buffer workspace(args.workspace_bytes);
  args.workspace = workspace.data();

  Result result;
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start), "event");
  check(cudaEventCreate(&stop), "event");
  for (int i = -5; i < samples; ++i) {
    check(cudaEventRecord(start), "record");
    check(static_cast<cudaError_t>(launch_forward(args)), "launch_forward");
    check(cudaEventRecord(stop), "record");
    check(cudaEventSynchronize(stop), "kda forward");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start, stop), "elapsed");
    if (i >= 0) result.samples.push_back(milliseconds);
  }
  std::vector<float> sorted = result.samples;
  std::sort(sorted.begin(), sorted.end());
  result.median = sorted[sorted.size() / 2];
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  return result;
}

void report(const Shape& shape, const Result& result, std::FILE* json, bool first) {
  double tokens = 0;
  for (const int64_t length : shape.lengths) tokens += static_cast<double>(length);
  const double H = static_cast<double>(shape.heads), d = 128, C = 64;
  const double flops = H * tokens * (6 * d * d + 3 * C * d + C * C);
  const double bytes = tokens * H * (5 * 2 * d + 2) + static_cast<double>(shape.lengths.size()) * H * d * d * 4;
  const double seconds = result.median * 1e-3;
  std::printf("%-14s %9.4f ms  %7.1f TFLOP/s  %6.3f TB/s of the byte floor\n", shape.name.c_str(), result.median,
              flops / seconds * 1e-12, bytes / seconds * 1e-12);
  if (json == nullptr) return;
  std::fprintf(json, "%s\n    {\"shape\": \"%s\", \"heads\": %lld, \"lengths\": [", first ? "" : ",",
               shape.name.c_str(), static_cast<long long>(shape.heads));
  for (size_t i = 0; i < shape.lengths.size(); ++i) {
    std::fprintf(json, "%s%lld", i == 0 ? "" : ", ", static_cast<long long>(shape.lengths[i]));
  }
  std::fprintf(json, "], \"median_ms\": %.5f, \"flops\": %.6g, \"floor_bytes\": %.6g, \"samples_ms\": [", result.median,
               flops, bytes);
  for (size_t i = 0; i < result.samples.size(); ++i) {
    std::fprintf(json, "%s%.5f", i == 0 ? "" : ", ", result.samples[i]);
  }
  std::fprintf(json, "]}");
}

}  // namespace
}  // namespace furlong::kda::cuda::test

int main(int argc, char** argv) {
  using namespace furlong::kda::cuda::test;
  int samples = 30;
  std::string only, kernels = "unknown";
  std::FILE* json = nullptr;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--samples" && i + 1 < argc) {
      samples = std::max(1, std::atoi(argv[++i]));
    } else if (option == "--shape" && i + 1 < argc) {
      only = argv[++i];
    } else if (option == "--json" && i + 1 < argc) {
      json = std::fopen(argv[++i], "w");
    } else if (option == "--kernels" && i + 1 < argc) {
      kernels = argv[++i];
    } else {
      std::fprintf(stderr,
                   "usage: kda_cuda_forward_bench [--samples N] [--shape NAME] [--json FILE] [--kernels HASH]\n");
      return 2;
    }
  }
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) {
    std::printf("SKIP: no CUDA device\n");
    return 77;
  }
  if (json != nullptr) {
    std::fprintf(json, "{\n  \"bench\": \"kda_forward\", \"device\": \"%s\", \"kernels\": \"%s\",\n  \"results\": [",
                 device.name, kernels.c_str());
  }
  bool first = true;
  for (const Shape& shape : shapes()) {
    if (!only.empty() && only != shape.name) continue;
    report(shape, time_shape(shape, samples), json, first);
    first = false;
  }
  if (json != nullptr) {
    std::fprintf(json, "\n  ]\n}\n");
    std::fclose(json);
  }
  return 0;
}
