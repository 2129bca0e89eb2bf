#pragma once

// Small device functions that the kernels of several operators share.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <type_traits>

namespace furlong::gpu {

constexpr int kVector = 4;  // adjacent columns of a thread

struct Vector4 {
  float at[kVector];
};

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

/// Four adjacent elements as they lie in memory: what a load in flight occupies.
template <typename T>
struct Raw4 {
  T at[kVector];
};

/// `count` of the four elements exist; kWhole: all, and the address is a multiple of their size.
template <bool kWhole, typename T>
__device__ inline Raw4<T> load_raw4(const T* p, int count) {
  Raw4<T> raw;
  if constexpr (kWhole) {
    using Word = std::conditional_t<sizeof(T) == 4, float4, uint2>;
    const Word word = *reinterpret_cast<const Word*>(p);
    __builtin_memcpy(&raw, &word, sizeof word);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) raw.at[i] = i < count ? p[i] : static_cast<T>(0.0f);
  }
  return raw;
}

template <typename T>
__device__ inline Vector4 to_float(const Raw4<T>& raw) {
  return {to_float(raw.at[0]), to_float(raw.at[1]), to_float(raw.at[2]), to_float(raw.at[3])};
}

template <bool kWhole, typename T>
__device__ inline Vector4 load4(const T* p, int count) {
  return to_float(load_raw4<kWhole>(p, count));
}

template <bool kWhole, typename T>
__device__ inline void store4(T* p, int count, const Vector4& x) {
  if constexpr (kWhole && sizeof(T) == 4) {
    *reinterpret_cast<float4*>(p) = {x.at[0], x.at[1], x.at[2], x.at[3]};
  } else if constexpr (kWhole) {
    uint2 raw;
    reinterpret_cast<__nv_bfloat162&>(raw.x) = __floats2bfloat162_rn(x.at[0], x.at[1]);
    reinterpret_cast<__nv_bfloat162&>(raw.y) = __floats2bfloat162_rn(x.at[2], x.at[3]);
    *reinterpret_cast<uint2*>(p) = raw;
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < count) p[i] = static_cast<T>(x.at[i]);
    }
  }
}

/// Whether load4<true> may read at p.
template <typename T>
bool is_vector_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % (kVector * sizeof(T)) == 0;
}

/// Element i of bf16 or fp32 data.
__device__ inline float load_element(const void* data, int64_t i, bool bf16) {
  return bf16 ? to_float(static_cast<const __nv_bfloat16*>(data)[i]) : static_cast<const float*>(data)[i];
}

__device__ inline void store_element(void* data, int64_t i, bool bf16, float value) {
  if (bf16) {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(value);
  } else {
    static_cast<float*>(data)[i] = value;
  }
}

/// To a few ulp, for any x.
__device__ inline float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + expf(-x));
}

/// Sum over the lanes whose number differs in the bits of kFrom ... 16.
template <int kFrom>
__device__ inline float lane_sum(float x) {
#pragma unroll
  for (int lanes = kFrom; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

/// A slot index cannot be checked on the host without waiting for the device: a wrong one stops the kernel.
__device__ inline int64_t checked_slot(int64_t slot, int64_t slots, const char* op) {
  if (slot < 0 || slot >= slots) {
    printf("[%s] slots_B: got %lld, need a slot of a pool of %lld\n", op, static_cast<long long>(slot),
           static_cast<long long>(slots));
    __trap();
  }
  return slot;
}

}  // namespace furlong::gpu
