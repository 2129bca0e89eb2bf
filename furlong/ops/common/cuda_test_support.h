#pragma once

// What the torch-free CUDA test programs share: device buffers in guard zones, checks that print one line each.

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace furlong::test {

// One rounding to bf16 (unit roundoff 2^-8) of a result that was right in fp32.
constexpr double kBf16Rounding = 4e-3;

inline int& failures() {
  static int count = 0;
  return count;
}

inline int& checks() {
  static int count = 0;
  return count;
}

inline void check(const std::string& name, bool ok, double figure) {
  ++checks();
  if (!ok) ++failures();
  if (!ok || std::getenv("VERBOSE") != nullptr)
    std::printf("%s %s (%.3g)\n", ok ? "ok  " : "FAIL", name.c_str(), figure);
}

/// Closing line and exit code.
inline int summary() {
  std::printf("%d passed, %d failed\n", checks() - failures(), failures());
  return failures() == 0 ? 0 : 1;
}

inline bool has_gpu() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return true;
  std::printf("SKIP: no CUDA device\n0 passed, 0 failed\n");
  return false;
}

inline void require_success(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAIL %s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

/// Device memory between two guard zones of NaN bytes, which a kernel must neither use nor change.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
    if (base_ != nullptr) cudaFree(base_);
  }

  void upload_bytes(const void* from, size_t bytes) {
    if (base_ != nullptr) cudaFree(base_);
    bytes_ = bytes;
    require_success(cudaMalloc(reinterpret_cast<void**>(&base_), bytes + 2 * kGuard), "cudaMalloc");
    require_success(cudaMemset(base_, 0xff, bytes + 2 * kGuard), "cudaMemset");
    if (bytes > 0) require_success(cudaMemcpy(base_ + kGuard, from, bytes, cudaMemcpyHostToDevice), "upload");
  }
  void upload(const std::vector<float>& x, bool bf16) {
    if (!bf16) return upload_bytes(x.data(), x.size() * sizeof(float));
    std::vector<__nv_bfloat16> narrow(x.size());
    std::transform(x.begin(), x.end(), narrow.begin(), [](float value) { return __float2bfloat16(value); });
    upload_bytes(narrow.data(), narrow.size() * sizeof(__nv_bfloat16));
  }
  std::vector<float> download(bool bf16) const {
    std::vector<char> bytes(bytes_);
    if (bytes_ > 0) require_success(cudaMemcpy(bytes.data(), data(), bytes_, cudaMemcpyDeviceToHost), "download");
    std::vector<float> x(bytes_ / (bf16 ? 2 : 4));
    for (size_t i = 0; i < x.size(); ++i) {
      if (bf16) {
        __nv_bfloat16 value;
        std::memcpy(&value, bytes.data() + 2 * i, 2);
        x[i] = __bfloat162float(value);
      } else {
        std::memcpy(&x[i], bytes.data() + 4 * i, 4);
      }
    }
    return x;
  }
  bool guards_hold() const {
    std::vector<unsigned char> zone(2 * kGuard);
    cudaMemcpy(zone.data(), base_, kGuard, cudaMemcpyDeviceToHost);
    cudaMemcpy(zone.data() + kGuard, base_ + kGuard + bytes_, kGuard, cudaMemcpyDeviceToHost);
    return std::all_of(zone.begin(), zone.end(), [](unsigned char byte) { return byte == 0xff; });
  }
  void* data() const { return base_ + kGuard; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kGuard = 4096;
  char* base_ = nullptr;
  size_t bytes_ = 0;
};

/// max |got - expected| over max |expected|; NaN counts as infinite.
inline double relative_error(const std::vector<float>& got, const std::vector<double>& expected) {
  double worst = 0, largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(got[i] - expected[i]);
    worst = error == error ? std::max(worst, error) : INFINITY;
    largest = std::max(largest, std::abs(expected[i]));
  }
  return largest > 0 ? worst / largest : worst;
}

}  // namespace furlong::test
