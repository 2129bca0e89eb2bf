// The gates on CUDA. A warp takes 128 columns along some rows, so that parameters are read once and their gradients add
// up in registers.
//   N packed tokens   H heads   K key size

#include "furlong/ops/kda/cuda/gate.h"

#include "furlong/ops/kda/cuda/gate.cuh"

namespace furlong::kda::cuda {

namespace {

using gpu::kVector;
using gpu::Vector4;

constexpr int kWarps = 4, kWarpRows = 16, kBlockRows = kWarps * kWarpRows;

/// A thread's four columns and its warp's rows.
struct Place {
  int64_t column, columns, first, last;
  int count;

  __device__ explicit Place(const GateArgs& in)
      : column((static_cast<int64_t>(blockIdx.y) * 32 + threadIdx.x) * kVector),
        columns(in.heads * in.key_size),
        first((static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y) * kWarpRows),
        last(min(first + kWarpRows, in.rows)),
        count(static_cast<int>(max(int64_t{0}, min(columns - column, static_cast<int64_t>(kVector))))) {}
};

struct Parameters {
  Vector4 a, dt_bias;
};

__device__ inline Parameters load_parameters(const GateArgs& in, const Place& at) {
  Parameters p{};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i >= at.count) break;
    p.a.at[i] = expf(in.a_log_H[(at.column + i) / in.key_size]);
    p.dt_bias.at[i] = in.dt_bias_HK[at.column + i];
  }
  return p;
}

template <bool kWhole, typename T>
__global__ void __launch_bounds__(32 * kWarps) gate_kernel(const GateArgs in, float* decay_log) {
  const Place at(in);
  if (at.count == 0) return;
  const Parameters p = load_parameters(in, at);
  const T* z = static_cast<const T*>(in.z);
#pragma unroll 4
  for (int64_t n = at.first; n < at.last; ++n) {
    Vector4 x = gpu::load4<kWhole>(z + n * at.columns + at.column, at.count);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float biased = x.at[i] + p.dt_bias.at[i];
      x.at[i] = in.form == GateForm::kBounded ? gate_bounded(biased, p.a.at[i], in.lower_bound)
                                              : gate_softplus(biased, p.a.at[i]);
    }
    gpu::store4<kWhole>(decay_log + n * at.columns + at.column, at.count, x);
  }
}

struct GateGradient {
  float z, a_log;
};

__device__ inline GateGradient gate_gradient(const GateArgs& in, float biased, float a, float d) {
  if (in.form == GateForm::kBounded) {
    const float y = gpu::sigmoid(a * biased);
    const float d_z = d * in.lower_bound * y * (1.0f - y) * a;
    return {d_z, d_z * biased};
  }
  return {-a * gpu::sigmoid(biased) * d, d * gate_softplus(biased, a)};
}

template <bool kWhole, typename T>
__global__ void __launch_bounds__(32 * kWarps)
    backward_kernel(const GateArgs in, const float* d_decay_log, T* d_z, float* workspace) {
  __shared__ Vector4 sums[2][kWarps][32];
  const Place at(in);
  const Parameters p = load_parameters(in, at);
  const T* z = static_cast<const T*>(in.z);
  Vector4 d_bias{}, d_a_log{};
  if (at.count > 0) {
#pragma unroll 4
    for (int64_t n = at.first; n < at.last; ++n) {
      const int64_t i0 = n * at.columns + at.column;
      const Vector4 x = gpu::load4<kWhole>(z + i0, at.count), d = gpu::load4<kWhole>(d_decay_log + i0, at.count);
      Vector4 out;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const GateGradient g = gate_gradient(in, x.at[i] + p.dt_bias.at[i], p.a.at[i], d.at[i]);
        out.at[i] = g.z;
        d_bias.at[i] += g.z;
        d_a_log.at[i] += g.a_log;
      }
      gpu::store4<kWhole>(d_z + i0, at.count, out);
    }
  }
  sums[0][threadIdx.y][threadIdx.x] = d_bias;
  sums[1][threadIdx.y][threadIdx.x] = d_a_log;
  __syncthreads();
  if (threadIdx.y >= 2 || at.count == 0) return;
  Vector4 total = sums[threadIdx.y][0][threadIdx.x];
  for (int warp = 1; warp < kWarps; ++warp) {
    for (int i = 0; i < kVector; ++i) total.at[i] += sums[threadIdx.y][warp][threadIdx.x].at[i];
  }
  gpu::store4<false>(workspace + (static_cast<int64_t>(blockIdx.x) * 2 + threadIdx.y) * at.columns + at.column,
                     at.count, total);
}

/// A head's sums over the row blocks, in ascending order; then over its columns for d_a_log.
__global__ void parameter_kernel(const GateArgs in, const float* workspace, int64_t blocks, float* d_a_log,
                                 float* d_dt_bias) {
  __shared__ float warp_sums[8];
  const int64_t h = blockIdx.x, columns = in.heads * in.key_size;
  float head_sum = 0;
  for (int d = threadIdx.x; d < in.key_size; d += blockDim.x) {
    const int64_t column = h * in.key_size + d;
    float bias = 0, a_log = 0;
#pragma unroll 8
    for (int64_t block = 0; block < blocks; ++block) {
      bias += workspace[block * 2 * columns + column];
      a_log += workspace[(block * 2 + 1) * columns + column];
    }
    d_dt_bias[column] = bias;
    head_sum += a_log;
  }
  head_sum = gpu::lane_sum<1>(head_sum);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = head_sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += warp_sums[warp];
  d_a_log[h] = total;
}

int64_t row_blocks(const GateArgs& in) {
  return (in.rows + kBlockRows - 1) / kBlockRows;
}

dim3 grid_of(const GateArgs& in) {
  const int64_t columns = in.heads * in.key_size;
  return {static_cast<unsigned>(row_blocks(in)), static_cast<unsigned>((columns + 32 * kVector - 1) / (32 * kVector))};
}

template <typename T>
int forward_of(const GateArgs& in, float* decay_log) {
  const bool whole = in.heads * in.key_size % kVector == 0 && gpu::is_vector_aligned<T>(in.z);
  const auto kernel = whole ? gate_kernel<true, T> : gate_kernel<false, T>;
  kernel<<<grid_of(in), dim3(32, kWarps), 0, in.stream>>>(in, decay_log);
  return cudaGetLastError();
}

template <typename T>
int backward_of(const GateArgs& in, const GateGradients& out) {
  const bool whole = in.heads * in.key_size % kVector == 0 && gpu::is_vector_aligned<T>(in.z) &&
                     gpu::is_vector_aligned<float>(out.d_decay_log);
  const auto kernel = whole ? backward_kernel<true, T> : backward_kernel<false, T>;
  kernel<<<grid_of(in), dim3(32, kWarps), 0, in.stream>>>(in, out.d_decay_log, static_cast<T*>(out.d_z), out.workspace);
  return cudaGetLastError();
}

}  // namespace

int64_t gate_backward_workspace(const GateArgs& in) {
  return row_blocks(in) * 2 * in.heads * in.key_size;
}

int launch_gate(const GateArgs& in, float* decay_log) {
  if (in.rows == 0 || in.heads * in.key_size == 0) return cudaSuccess;
  return in.type == Element::kBFloat16 ? forward_of<__nv_bfloat16>(in, decay_log) : forward_of<float>(in, decay_log);
}

int launch_gate_backward(const GateArgs& in, const GateGradients& out) {
  if (in.heads * in.key_size == 0) return cudaSuccess;
  if (in.rows > 0) {
    const int error = in.type == Element::kBFloat16 ? backward_of<__nv_bfloat16>(in, out) : backward_of<float>(in, out);
    if (error != cudaSuccess) return error;
  }
  parameter_kernel<<<static_cast<unsigned>(in.heads), 128, 0, in.stream>>>(in, out.workspace, row_blocks(in),
                                                                           out.d_a_log_H, out.d_dt_bias_HK);
  return cudaGetLastError();
}

}  // namespace furlong::kda::cuda
