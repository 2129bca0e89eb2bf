#pragma once

// Device side of the torch-free CUDA test programs: guarded buffers, upload, one call.

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "furlong/ops/kda/cuda/test_case.h"

namespace furlong::kda::cuda::test {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

/// Without it, memory that a kernel has to write first stays as it was allocated: for initcheck.
inline bool fill_with_nan = true;

/// Device memory between two guard zones; everything is filled with bytes of 0xff (NaN in bf16 and fp32).
class Buffer {
 public:
  static constexpr size_t kGuard = 4096;
  Buffer() = default;
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&base_, padded() + 2 * kGuard), "cudaMalloc");
    check(cudaMemset(base_, 0xff, kGuard), "cudaMemset");
    check(cudaMemset(data<char>() + bytes_, 0xff, padded() - bytes_ + kGuard), "cudaMemset");
    poison();
  }
  Buffer(Buffer&& other) noexcept : base_(other.base_), bytes_(other.bytes_) { other.base_ = nullptr; }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() { cudaFree(base_); }

  template <typename T = void>
  T* data() const {
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(static_cast<char*>(base_) + kGuard);
  }
  size_t bytes() const { return bytes_; }
  void poison() const {
    if (fill_with_nan) check(cudaMemset(data(), 0xff, bytes_), "cudaMemset");
  }

  template <typename T>
  static Buffer of(const std::vector<T>& values) {
    Buffer buffer(values.size() * sizeof(T));
    check(cudaMemcpy(buffer.data(), values.data(), buffer.bytes_, cudaMemcpyHostToDevice), "upload");
    return buffer;
  }
  static Buffer of(const std::vector<float>& values, Element type) {
    if (type == Element::kFloat) return of(values);
    std::vector<uint16_t> narrow(values.size());
    for (size_t i = 0; i < values.size(); ++i) narrow[i] = to_bf16(values[i]);
    return of(narrow);
  }

  template <typename T>
  std::vector<T> download() const {
    std::vector<T> values(bytes_ / sizeof(T));
    check(cudaMemcpy(values.data(), data(), bytes_, cudaMemcpyDeviceToHost), "download");
    return values;
  }
  bool guards_untouched() const {
    std::vector<unsigned char> zone(kGuard + padded() - bytes_);
    check(cudaMemcpy(zone.data(), base_, kGuard, cudaMemcpyDeviceToHost), "guard");
    for (size_t i = 0; i < kGuard; ++i)
      if (zone[i] != 0xff) return false;
    check(cudaMemcpy(zone.data(), data<char>() + bytes_, zone.size(), cudaMemcpyDeviceToHost), "guard");
    for (const unsigned char byte : zone)
      if (byte != 0xff) return false;
    return true;
  }

 private:
  size_t padded() const { return (bytes_ + 255) / 256 * 256; }
  void* base_ = nullptr;
  size_t bytes_ = 0;
};

/// One case on the device.
struct DeviceCase {
  Buffer q, k, v, gate, beta, a_log, dt_bias, offsets, state, out, final_state, workspace;
  ForwardArgs args;

  DeviceCase(const Case& c, const HostData& d, float scale) {
    const int64_t H = c.heads, K = c.key_size, V = c.value_size;
    q = Buffer::of(d.q, c.type);
    k = Buffer::of(d.k, c.type);
    v = Buffer::of(d.v, c.type);
    gate = Buffer::of(d.gate, c.gate_type);
    beta = Buffer::of(d.beta, c.fused ? c.type : Element::kFloat);
    a_log = Buffer::of(d.a_log);
    dt_bias = Buffer::of(d.dt_bias);
    offsets = Buffer::of(d.offsets);
    out = Buffer(d.v.size() * (c.type == Element::kFloat ? 4 : 2));
    final_state = Buffer(c.sequences() * H * K * V * 4);
    Inputs& in = args.in;
    in.q_NHK = {q.data(), H * K, K, c.type};
    in.k_NHK = {k.data(), H * K, K, c.type};
    in.v_NHV = {v.data(), H * V, V, c.type};
    in.gate_NHK = {gate.data(), H * K, K, c.gate_type};
    in.beta_NH = {beta.data(), H, 1, c.fused ? c.type : Element::kFloat};
    in.gate_form = c.form;
    in.beta_is_logit = c.fused;
    in.l2_norm = c.fused;
    in.a_log_H = a_log.data<float>();
    in.dt_bias_HK = dt_bias.data<float>();
    in.scale = scale;
    in.offsets = offsets.data<int64_t>();
    in.tokens = c.tokens();
    in.sequences = c.sequences();
    in.heads = H;
    in.key_size = K;
    in.value_size = V;
    args.out_NHV = out.data();
    args.final_state_SHKV = final_state.data<float>();
    if (c.initial_state) {
      state = Buffer::of(d.state);
      args.initial_state_SHKV = state.data<float>();
    }
    for (const int64_t length : c.lengths) {
      args.longest = std::max(args.longest, length);
      args.splits += split_segments(length, H) > 1 ? 1 : 0;
    }
    args.workspace_bytes = forward_workspace_bytes(args);
    workspace = Buffer(args.workspace_bytes);
    args.workspace = workspace.data();
  }

  void run() const {
    check(static_cast<cudaError_t>(launch_forward(args)), "launch_forward");
    check(cudaDeviceSynchronize(), "kda forward");
  }
  std::vector<float> output(Element type) const {
    if (type == Element::kFloat) return out.download<float>();
    const auto narrow = out.download<uint16_t>();
    std::vector<float> wide(narrow.size());
    for (size_t i = 0; i < wide.size(); ++i) wide[i] = from_bf16(narrow[i]);
    return wide;
  }
  bool guards_untouched() const {
    for (const Buffer* buffer : {&q, &k, &v, &gate, &beta, &out, &final_state, &workspace})
      if (!buffer->guards_untouched()) return false;
    return true;
  }
};

}  // namespace furlong::kda::cuda::test
