// Times the CUDA gradient of kda_chunk in its fused form (bf16, D = 128, bounded gate, norm and sigmoid inside).
//
//   cuda_backward_bench [--out FILE] [--hash HASH] [--repeats N] [--slice S] [--shape T,H,B]...
//
// Writes JSON: raw samples of both launches in milliseconds, bytes of inputs, gradients and workspaces, the hash given.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "furlong/ops/kda/cuda/backward_args.h"

namespace furlong::kda::cuda {
namespace {

void check(int error, const char* what) {
  if (error == 0) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

/// Roughly normal numbers from a counter.
__global__ void draw(void* to, bool bf16, int64_t count, unsigned seed, float scale, float shift) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    uint64_t x = i * 0x9e3779b97f4a7c15ull + seed;
    float sum = 0;
    for (int n = 0; n < 4; ++n) {
      x ^= x >> 31;
      x *= 0xbf58476d1ce4e5b9ull;
      x ^= x >> 27;
      sum += static_cast<float>(x >> 40) * (1.0f / 16777216.0f) - 0.5f;
    }
    const float value = sum * 1.7320508f * scale + shift;
    if (bf16) {
      static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16(value);
    } else {
      static_cast<float*>(to)[i] = value;
    }
  }
}

struct Shape {
  int64_t T, H, B;
};

class Memory {
 public:
  ~Memory() {
    for (void* p : pieces_) cudaFree(p);
  }
  void* take(size_t bytes) {
    void* p = nullptr;
    check(cudaMalloc(&p, bytes), "cudaMalloc");
    pieces_.push_back(p);
    bytes_ += bytes;
    return p;
  }
  void* random(int64_t count, bool bf16, float scale, float shift) {
    void* p = take(count * (bf16 ? 2 : 4));
    draw<<<1024, 256>>>(p, bf16, count, static_cast<unsigned>(pieces_.size()) * 7919u, scale, shift);
    return p;
  }
  size_t bytes() const { return bytes_; }

 private:
  std::vector<void*> pieces_;
  size_t bytes_ = 0;
};

double median(std::vector<float> x) {
  std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
  return x[x.size() / 2];
}

std::string list(const std::vector<float>& x) {
  std::string text;
  for (float value : x) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

std::string measure(const Shape& shape, int repeats, int slice) {
  constexpr int64_t D = 128;
  const int64_t N = shape.T * shape.B, keys = N * shape.H * D;
  Memory memory;
  BackwardArgs args;
  Inputs& in = args.in;
  const auto rows = [&](float scale, float shift) {
    return Rows{memory.random(keys, true, scale, shift), shape.H * D, D, Element::kBFloat16};
  };
  in.q_NHK = rows(1, 0);
  in.k_NHK = rows(1, 0);
  in.v_NHV = rows(1, 0);
  in.gate_NHK = rows(2, -2);
  args.d_out_NHV = rows(1, 0);
  in.beta_NH = {memory.random(N * shape.H, true, 2, 0), shape.H, 1, Element::kBFloat16};
  in.gate_form = GateForm::kBounded;
  in.beta_is_logit = in.l2_norm = true;
  in.a_log_H = static_cast<const float*>(memory.random(shape.H, false, 0.3f, 0));
  in.dt_bias_HK = static_cast<const float*>(memory.random(shape.H * D, false, 0.5f, 0));
  in.scale = 0.08838834764f;
  std::vector<int64_t> offsets;
  for (int64_t b = 0; b <= shape.B; ++b) offsets.push_back(b * shape.T);
  void* offsets_device = memory.take(offsets.size() * 8);
  check(cudaMemcpy(offsets_device, offsets.data(), offsets.size() * 8, cudaMemcpyHostToDevice), "copy");
  in.offsets = static_cast<const int64_t*>(offsets_device);
  in.tokens = N;
  in.sequences = shape.B;
  in.heads = shape.H;
  in.key_size = in.value_size = D;
  args.d_q_NHK = memory.take(keys * 2);
  args.d_k_NHK = memory.take(keys * 2);
  args.d_v_NHV = memory.take(keys * 2);
  args.d_gate_NHK = memory.take(keys * 2);
  args.d_beta_NH = memory.take(N * shape.H * 2);
  args.d_initial_state_BHKV = static_cast<float*>(memory.take(shape.B * shape.H * D * D * 4));
  args.d_a_log_H = static_cast<float*>(memory.take(shape.H * 4));
  args.d_dt_bias_HK = static_cast<float*>(memory.take(shape.H * D * 4));
  const size_t tensors = memory.bytes(), early = backward_early_bytes(in), kept = backward_kept_bytes(in);
  args.early = memory.take(early);
  args.kept = memory.take(kept);
  args.walk_slice = slice;
  cudaEvent_t events[3];
  for (cudaEvent_t& event : events) check(cudaEventCreate(&event), "event");
  std::vector<float> walk, finish;
  for (int i = -3; i < repeats; ++i) {
    check(cudaEventRecord(events[0]), "record");
    check(launch_backward_walk(args), "walk");
    check(cudaEventRecord(events[1]), "record");
    check(launch_backward_finish(args), "finish");
    check(cudaEventRecord(events[2]), "record");
    check(cudaEventSynchronize(events[2]), "run");
    float first = 0, second = 0;
    cudaEventElapsedTime(&first, events[0], events[1]);
    cudaEventElapsedTime(&second, events[1], events[2]);
    if (i < 0) continue;
    walk.push_back(first);
    finish.push_back(second);
  }
  // The gradients but d_beta and the states may lie where `early` was.
  const size_t gradients = keys * 2 * 4, peak = tensors + kept + (early > gradients ? early - gradients : 0);
  std::printf("T %6ld H %3ld B %2ld slice %3d: walk %.3f ms, finish %.3f ms, both %.3f ms; peak %.2f GB\n",
              static_cast<long>(shape.T), static_cast<long>(shape.H), static_cast<long>(shape.B), slice, median(walk),
              median(finish), median(walk) + median(finish), peak * 1e-9);
  std::fflush(stdout);
  return "{\"T\": " + std::to_string(shape.T) + ", \"H\": " + std::to_string(shape.H) +
         ", \"B\": " + std::to_string(shape.B) + ", \"D\": 128, \"slice\": " + std::to_string(slice) +
         ", \"tensor_bytes\": " + std::to_string(tensors) + ", \"early_bytes\": " + std::to_string(early) +
         ", \"kept_bytes\": " + std::to_string(kept) + ", \"peak_bytes\": " + std::to_string(peak) +
         ", \"walk_ms\": " + list(walk) + ", \"finish_ms\": " + list(finish) + "}";
}

int run(int argc, char** argv) {
  std::string out, hash = "unknown";
  int repeats = 20, slice = 0;
  std::vector<Shape> shapes;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--out") out = argv[i + 1];
    if (name == "--hash") hash = argv[i + 1];
    if (name == "--repeats") repeats = std::atoi(argv[i + 1]);
    if (name == "--slice") slice = std::atoi(argv[i + 1]);
    long T, H, B;
    if (name == "--shape" && std::sscanf(argv[i + 1], "%ld,%ld,%ld", &T, &H, &B) == 3) shapes.push_back({T, H, B});
  }
  if (shapes.empty()) shapes = {{8192, 96, 1}, {8192, 32, 1}, {65536, 32, 1}, {1024, 96, 8}, {131072, 8, 1}};
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "device");
  std::string rows;
  for (const Shape& shape : shapes) rows += (rows.empty() ? "\n  " : ",\n  ") + measure(shape, repeats, slice);
  const std::string json = std::string("{\"bench\": \"cuda_backward\", \"device\": \"") + device.name +
                           "\", \"source_hash\": \"" + hash + "\", \"rows\": [" + rows + "\n]}\n";
  if (!out.empty()) {
    std::FILE* file = std::fopen(out.c_str(), "w");
    if (file == nullptr) return 1;
    std::fputs(json.c_str(), file);
    std::fclose(file);
  }
  return 0;
}

}  // namespace
}  // namespace furlong::kda::cuda

int main(int argc, char** argv) {
  return furlong::kda::cuda::run(argc, argv);
}
