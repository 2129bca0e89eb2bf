// Gradient on CUDA. With u the convolution before SiLU and du = dy silu'(u):
//
//   dx[t] = sum_j w_j du[t + T - j]        dw_j = sum_t du[t] x[t - T + j]
//
// A warp walks its rows of one sequence T rows past their end, with the last W inputs and the last W values of du in
// registers: at row n it knows dx of row n - T. Row n - T of a sequence's first T rows is the initial tail's gradient.
//   N packed tokens   B sequences   P channels   W kernel width   T = W - 1 tail columns

#include "furlong/ops/short_conv/cuda_rows.cuh"

namespace furlong::short_conv_detail {

namespace {

/// Rows first ... last - 1, which belong to sequence b of rows start ... end - 1.
struct Segment {
  int64_t b, start, end, first, last;
};

template <int kTaps, bool kWhole, typename T>
struct GradientWalk {
  const ConvBackwardLaunch& in;
  int64_t channel;
  int count;
  const Taps<kTaps> taps, from_oldest;
  Vector4 d_taps[kTaps];

  __device__ GradientWalk(const ConvBackwardLaunch& launch, int64_t channel, int count)
      : in(launch),
        channel(channel),
        count(count),
        taps(load_taps<kTaps, kWhole>(launch.weight, channel, count, launch.shape.width)),
        from_oldest(kWhole ? taps : load_taps<kTaps, kWhole, true>(launch.weight, channel, count, launch.shape.width)),
        d_taps{} {}

  /// du of a row whose inputs stand in the window. Adds to the weight gradient if the row is this warp's own.
  __device__ Vector4 d_u(const Vector4 (&window)[kTaps], Vector4 d, bool own) {
    const Vector4 u = convolve(taps, window);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float s = sigmoid(u.at[i]);
      d.at[i] *= s * (1.0f + u.at[i] * (1.0f - s));
#pragma unroll
      for (int c = 0; c < kTaps; ++c) {
        if (own) d_taps[c].at[i] = fmaf(d.at[i], window[c].at[i], d_taps[c].at[i]);
      }
    }
    return d;
  }

  /// The gradient of padded row n - start of the segment's sequence, once du of row n is the newest of the ring.
  __device__ void write_gradient(const Segment& s, const Vector4 (&ring)[kTaps], int64_t n) {
    const int tail_rows = in.shape.width - 1;
    const int64_t P = in.shape.channels;
    const T* d_final = static_cast<const T*>(in.d_final_tail);
    Vector4 d{};
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {  // du[n - j] = du[m + T - j] of m = n - T
#pragma unroll
      for (int i = 0; i < kVector; ++i) d.at[i] = fmaf(from_oldest.w[j].at[i], ring[kTaps - 1 - j].at[i], d.at[i]);
    }
    const int64_t padded = n - s.start, kept = padded - (s.end - s.start);
    if (d_final != nullptr && kept >= 0) {
      const Vector4 more = load4<kWhole>(d_final + (s.b * tail_rows + kept) * P + channel, count);
#pragma unroll
      for (int i = 0; i < kVector; ++i) d.at[i] += more.at[i];
    }
    T* to = padded < tail_rows ? static_cast<T*>(in.d_initial_tail) + (s.b * tail_rows + padded) * P
                               : static_cast<T*>(in.d_x) + (n - tail_rows) * P;
    store4<kWhole>(to + channel, count, d);
  }

  __device__ void run(const Segment& s) {
    const int tail_rows = in.shape.width - 1;
    const T *x = static_cast<const T*>(in.x), *d_y = static_cast<const T*>(in.d_y);
    Vector4 window[kTaps], ring[kTaps] = {};  // ring: du of the last rows, newest last
    load_window<kTaps, kWhole>(window, x, in.x_stride, static_cast<const T*>(in.initial_tail), s.b, s.start,
                               s.first - s.start, in.shape.width, in.shape.channels, channel, count);
    constexpr int kBatch = kTaps > 4 ? 1 : kAhead;
    const int64_t past_end = s.last + tail_rows;
    // The first T rows of a segment that continues a sequence belong to the warp before.
    const int64_t first_written = s.first > s.start ? s.first + tail_rows : s.first;
    for (int64_t n0 = s.first; n0 < past_end; n0 += kBatch) {
      gpu::Raw4<T> rows[kBatch], gradients[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t n = n0 + i;
        if (n >= past_end || n >= s.end) break;
        rows[i] = gpu::load_raw4<kWhole>(x + n * in.x_stride + channel, count);
        gradients[i] = gpu::load_raw4<kWhole>(d_y + n * in.d_y_stride + channel, count);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t n = n0 + i;
        if (n >= past_end) break;
        shift_window(ring);
        ring[kTaps - 1] = Vector4{};
        if (n < s.end) {
          window[kTaps - 1] = gpu::to_float(rows[i]);
          ring[kTaps - 1] = d_u(window, gpu::to_float(gradients[i]), n < s.last);
          shift_window(window);
        }
        if (n >= first_written) write_gradient(s, ring, n);
      }
    }
  }
};

template <int kTaps, bool kWhole, typename T>
__global__ void __launch_bounds__(32 * kWarps, kTaps > 4 ? 1 : 4) backward_kernel(const ConvBackwardLaunch in) {
  __shared__ Vector4 sums[kWarps][32];
  const ConvShape& shape = in.shape;
  const int64_t channel = (static_cast<int64_t>(blockIdx.y) * 32 + threadIdx.x) * kVector, P = shape.channels;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y) * kWarpRows;
  const int64_t last = min(first + kWarpRows, shape.rows);
  const bool active = channel < P;
  const int count = active ? static_cast<int>(min(P - channel, static_cast<int64_t>(kVector))) : 0;
  const int64_t tokens = min(shape.offsets[shape.sequences], shape.rows);
  GradientWalk<kTaps, kWhole, T> walk(in, active ? channel : 0, count);
  if (active) {
    const int64_t end = min(last, tokens);
    for (int64_t n = first; n < end;) {
      const int64_t b = sequence_of(shape.offsets, shape.sequences, n);
      const Segment segment{b, shape.offsets[b], shape.offsets[b + 1], n, min(end, shape.offsets[b + 1])};
      walk.run(segment);
      n = segment.last;
    }
    for (int64_t n = max(first, tokens); n < last; ++n) {
      store4<kWhole>(static_cast<T*>(in.d_x) + n * P + channel, count, Vector4{});
    }
  }
#pragma unroll
  for (int c = 0; c < kTaps; ++c) {
    const int j = c - (kTaps - shape.width);
    if (j < 0) continue;
    __syncthreads();
    sums[threadIdx.y][threadIdx.x] = walk.d_taps[c];
    __syncthreads();
    if (threadIdx.y != 0 || !active) continue;
    Vector4 total = sums[0][threadIdx.x];
    for (int warp = 1; warp < kWarps; ++warp) {
      for (int i = 0; i < kVector; ++i) total.at[i] += sums[warp][threadIdx.x].at[i];
    }
    store4<false>(in.workspace + (static_cast<int64_t>(blockIdx.x) * shape.width + j) * P + channel, count, total);
  }
}

/// d_weight[p, j]: the sum of the row blocks' parts in ascending order.
__global__ void weight_kernel(const ConvBackwardLaunch in, int64_t blocks) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int width = in.shape.width, j = blockIdx.y;
  if (p >= in.shape.channels) return;
  float partial[8] = {};  // independent chains: the loads do not wait for the sums
  int64_t block = 0;
  for (; block + 8 <= blocks; block += 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) partial[i] += in.workspace[((block + i) * width + j) * in.shape.channels + p];
  }
  for (int i = 0; block < blocks; ++block, ++i) partial[i] += in.workspace[(block * width + j) * in.shape.channels + p];
  float total = 0;
  for (const float part : partial) total += part;
  in.d_weight[p * width + j] = total;
}

int64_t row_blocks(const ConvShape& shape) {
  return (shape.rows + kGradientBlockRows - 1) / kGradientBlockRows;
}

template <typename T>
cudaError_t backward_of(const ConvBackwardLaunch& in, cudaStream_t stream) {
  const ConvShape& shape = in.shape;
  const auto aligned = gpu::is_vector_aligned<T>;
  const bool whole = shape.width == 4 && shape.channels % kVector == 0 && in.x_stride % kVector == 0 &&
                     in.d_y_stride % kVector == 0 && aligned(in.x) && aligned(in.d_y) && aligned(in.initial_tail) &&
                     aligned(in.d_final_tail) && aligned(in.d_x) && aligned(in.d_initial_tail) &&
                     gpu::is_vector_aligned<float>(in.weight);
  const unsigned columns = static_cast<unsigned>((shape.channels + 32 * kVector - 1) / (32 * kVector));
  const dim3 block(32, kWarps), grid(static_cast<unsigned>(row_blocks(shape)), columns);
  if (shape.rows > 0) {
    if (whole) {
      backward_kernel<4, true, T><<<grid, block, 0, stream>>>(in);
    } else if (shape.width <= 4) {
      backward_kernel<4, false, T><<<grid, block, 0, stream>>>(in);
    } else {
      backward_kernel<kMaxCudaWidth, false, T><<<grid, block, 0, stream>>>(in);
    }
  }
  const dim3 weights(static_cast<unsigned>((shape.channels + 127) / 128), static_cast<unsigned>(shape.width));
  weight_kernel<<<weights, 128, 0, stream>>>(in, row_blocks(shape));
  return cudaGetLastError();
}

}  // namespace

int64_t conv_backward_workspace(const ConvShape& shape) {
  return row_blocks(shape) * shape.width * shape.channels;
}

cudaError_t launch_conv_backward(const ConvBackwardLaunch& in, cudaStream_t stream) {
  if (in.shape.width < 1 || in.shape.width > kMaxCudaWidth) return cudaErrorInvalidValue;
  if (in.shape.channels == 0) return cudaSuccess;
  return in.shape.bf16 ? backward_of<__nv_bfloat16>(in, stream) : backward_of<float>(in, stream);
}

}  // namespace furlong::short_conv_detail
