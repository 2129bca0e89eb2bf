// Forward and step on CUDA. A warp takes 128 channels along kWarpRows packed rows with the last W inputs in registers;
// x is read once (and W - 1 rows before each piece again), y written once.
//   N packed tokens   B sequences   S state slots   P channels   W kernel width   T = W - 1 tail columns

#include "furlong/ops/short_conv/cuda_rows.cuh"

namespace furlong::short_conv_detail {

namespace {

template <int kTaps, bool kWhole, typename T>
__global__ void __launch_bounds__(32 * kWarps) forward_kernel(const ConvForwardLaunch in) {
  const ConvShape& shape = in.shape;
  const int64_t channel = (static_cast<int64_t>(blockIdx.y) * 32 + threadIdx.x) * kVector, P = shape.channels;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y) * kWarpRows;
  const int64_t last = min(first + kWarpRows, shape.rows);
  if (channel >= P || first >= last) return;
  const int count = static_cast<int>(min(P - channel, static_cast<int64_t>(kVector)));
  const T* x = static_cast<const T*>(in.x);
  T* y = static_cast<T*>(in.y);
  const int64_t tokens = min(shape.offsets[shape.sequences], shape.rows), end = min(last, tokens);
  const Taps<kTaps> taps = load_taps<kTaps, kWhole>(in.weight, channel, count, shape.width);

  int64_t b = 0, next_start = first;  // row at which the window must be filled anew
  Vector4 window[kTaps];
  for (int64_t n = first; n < end; n += kAhead) {
    gpu::Raw4<T> rows[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (n + i < end) rows[i] = gpu::load_raw4<kWhole>(x + (n + i) * in.x_stride + channel, count);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (n + i >= end) break;
      if (n + i == next_start) {
        b = sequence_of(shape.offsets, shape.sequences, n + i);
        const int64_t start = shape.offsets[b];
        next_start = shape.offsets[b + 1];
        load_window<kTaps, kWhole>(window, x, in.x_stride, static_cast<const T*>(in.initial_tail), b, start,
                                   n + i - start, shape.width, P, channel, count);
      }
      window[kTaps - 1] = gpu::to_float(rows[i]);
      Vector4 u = convolve(taps, window);
#pragma unroll
      for (int j = 0; j < kVector; ++j) u.at[j] *= sigmoid(u.at[j]);
      store4<kWhole>(y + (n + i) * P + channel, count, u);
      shift_window(window);
    }
  }
  for (int64_t n = max(first, tokens); n < last; ++n) store4<kWhole>(y + n * P + channel, count, Vector4{});
}

/// final_tail[b, j] is padded row length + j of sequence b.
template <typename T>
__global__ void tail_kernel(const ConvForwardLaunch in) {
  const ConvShape& shape = in.shape;
  const int64_t p = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x, P = shape.channels;
  if (p >= P) return;
  const int64_t tail_rows = shape.width - 1, b = blockIdx.x / tail_rows, j = blockIdx.x % tail_rows;
  const int64_t start = shape.offsets[b], row = shape.offsets[b + 1] - start + j;
  T value = static_cast<T>(0.0f);
  if (row >= tail_rows) {
    value = static_cast<const T*>(in.x)[(start + row - tail_rows) * in.x_stride + p];
  } else if (in.initial_tail != nullptr) {
    value = static_cast<const T*>(in.initial_tail)[(b * tail_rows + row) * P + p];
  }
  static_cast<T*>(in.final_tail)[(b * tail_rows + j) * P + p] = value;
}

template <typename T>
__global__ void step_kernel(const ConvStepLaunch in) {
  const int64_t p = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x, b = blockIdx.x;
  const int64_t slot = gpu::checked_slot(in.slot[b], in.slots, "short_conv_step_");
  if (p >= in.shape.channels) return;
  const int tail_rows = in.shape.width - 1;
  T* tail = static_cast<T*>(in.pool) + slot * in.slot_stride + p;
  const T newest = static_cast<const T*>(in.x)[b * in.x_stride + p];
  const float* w = in.weight + p * in.shape.width;
  float u = 0;
  for (int j = 0; j < tail_rows; ++j) {
    const T value = tail[j * in.column_stride];
    u = fmaf(w[j], gpu::to_float(value), u);
    if (j > 0) tail[(j - 1) * in.column_stride] = value;
  }
  u = fmaf(w[tail_rows], gpu::to_float(newest), u);
  if (tail_rows > 0) tail[(tail_rows - 1) * in.column_stride] = newest;
  static_cast<T*>(in.y)[b * in.shape.channels + p] = static_cast<T>(u * sigmoid(u));
}

template <typename T>
cudaError_t forward_of(const ConvForwardLaunch& in, cudaStream_t stream) {
  const ConvShape& shape = in.shape;
  const auto aligned = gpu::is_vector_aligned<T>;
  const bool whole = shape.width == 4 && shape.channels % kVector == 0 && in.x_stride % kVector == 0 && aligned(in.x) &&
                     aligned(in.y) && aligned(in.initial_tail) && gpu::is_vector_aligned<float>(in.weight);
  const unsigned columns = static_cast<unsigned>((shape.channels + 32 * kVector - 1) / (32 * kVector));
  const dim3 block(32, kWarps);
  if (shape.rows > 0) {
    const dim3 grid(static_cast<unsigned>((shape.rows + kGradientBlockRows - 1) / kGradientBlockRows), columns);
    if (whole) {
      forward_kernel<4, true, T><<<grid, block, 0, stream>>>(in);
    } else if (shape.width <= 4) {
      forward_kernel<4, false, T><<<grid, block, 0, stream>>>(in);
    } else {
      forward_kernel<kMaxCudaWidth, false, T><<<grid, block, 0, stream>>>(in);
    }
  }
  const int64_t tails = shape.sequences * (shape.width - 1);
  if (tails > 0) {
    const dim3 grid(static_cast<unsigned>(tails), static_cast<unsigned>((shape.channels + 255) / 256));
    tail_kernel<T><<<grid, 256, 0, stream>>>(in);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_conv_forward(const ConvForwardLaunch& in, cudaStream_t stream) {
  if (in.shape.width < 1 || in.shape.width > kMaxCudaWidth) return cudaErrorInvalidValue;
  if (in.shape.channels == 0) return cudaSuccess;
  return in.shape.bf16 ? forward_of<__nv_bfloat16>(in, stream) : forward_of<float>(in, stream);
}

cudaError_t launch_conv_step(const ConvStepLaunch& in, cudaStream_t stream) {
  const ConvShape& shape = in.shape;
  if (shape.rows == 0 || shape.channels == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(shape.rows), static_cast<unsigned>((shape.channels + 127) / 128));
  if (shape.bf16) {
    step_kernel<__nv_bfloat16><<<grid, 128, 0, stream>>>(in);
  } else {
    step_kernel<float><<<grid, 128, 0, stream>>>(in);
  }
  return cudaGetLastError();
}

}  // namespace furlong::short_conv_detail
