#pragma once

// What the convolution kernels share: four adjacent channels a thread, the walk of a warp along packed rows.
//   N packed tokens   B sequences   P channels   W kernel width   T = W - 1 tail columns

#include "furlong/ops/common/cuda_device.cuh"
#include "furlong/ops/short_conv/cuda_conv.h"

namespace furlong::short_conv_detail {

using gpu::kVector;
using gpu::load4;
using gpu::sigmoid;
using gpu::store4;
using gpu::Vector4;

constexpr int kWarps = 4;  // of a block; each walks its own rows of the same channels
constexpr int kWarpRows = 32;
constexpr int kAhead = 4;  // rows whose loads leave together
static_assert(kWarps * kWarpRows == kGradientBlockRows);

/// Weights of four channels. With W < kTaps the missing places are zero: the first ones (tap c meets the input
/// kTaps - 1 - c rows back), or with kOldestFirst the last ones (tap c is weight c).
template <int kTaps>
struct Taps {
  Vector4 w[kTaps];
};

template <int kTaps, bool kWhole, bool kOldestFirst = false>
__device__ inline Taps<kTaps> load_taps(const float* weight_PW, int64_t channel, int count, int width) {
  Taps<kTaps> taps{};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if constexpr (kWhole) {
      static_assert(kTaps == 4);
      const float4 w = reinterpret_cast<const float4*>(weight_PW)[channel + i];
      taps.w[0].at[i] = w.x, taps.w[1].at[i] = w.y, taps.w[2].at[i] = w.z, taps.w[3].at[i] = w.w;
    } else {
#pragma unroll
      for (int c = 0; c < kTaps; ++c) {
        const int j = kOldestFirst ? c : c - (kTaps - width);
        if (i < count && j >= 0 && j < width) taps.w[c].at[i] = weight_PW[(channel + i) * width + j];
      }
    }
  }
  return taps;
}

/// The sequence that row n belongs to: the last one that starts at or before n. offsets[B] > n.
__device__ inline int64_t sequence_of(const int64_t* offsets, int64_t sequences, int64_t n) {
  int64_t low = 0, high = sequences;  // offsets[low] <= n < offsets[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (offsets[middle] <= n) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Row `back` rows before a sequence's row r (back > r: from the tail, zero without one).
template <bool kWhole, typename T>
__device__ inline Vector4 earlier_row(const T* x, int64_t x_stride, const T* tail_BTP, int64_t b, int64_t start,
                                      int64_t r, int back, int tail_rows, int64_t channels, int64_t channel,
                                      int count) {
  const int64_t row = r - back;
  if (row >= 0) return load4<kWhole>(x + (start + row) * x_stride + channel, count);
  if (tail_BTP == nullptr || row + tail_rows < 0) return Vector4{};
  return load4<kWhole>(tail_BTP + (b * tail_rows + tail_rows + row) * channels + channel, count);
}

/// The first kTaps - 1 places of the window of a sequence's row r: the rows before it, oldest first.
template <int kTaps, bool kWhole, typename T>
__device__ inline void load_window(Vector4 (&window)[kTaps], const T* x, int64_t x_stride, const T* tail_BTP, int64_t b,
                                   int64_t start, int64_t r, int width, int64_t channels, int64_t channel, int count) {
#pragma unroll
  for (int c = 0; c < kTaps - 1; ++c) {
    const int back = kTaps - 1 - c;
    window[c] = back < width
                    ? earlier_row<kWhole>(x, x_stride, tail_BTP, b, start, r, back, width - 1, channels, channel, count)
                    : Vector4{};
  }
}

template <int kTaps>
__device__ inline void shift_window(Vector4 (&window)[kTaps]) {
#pragma unroll
  for (int c = 0; c + 1 < kTaps; ++c) window[c] = window[c + 1];
}

template <int kTaps>
__device__ inline Vector4 convolve(const Taps<kTaps>& taps, const Vector4 (&window)[kTaps]) {
  Vector4 u{};
#pragma unroll
  for (int c = 0; c < kTaps; ++c) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) u.at[i] = fmaf(taps.w[c].at[i], window[c].at[i], u.at[i]);
  }
  return u;
}

}  // namespace furlong::short_conv_detail
