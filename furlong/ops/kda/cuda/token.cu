// The recurrence of kda.h token by token in fp32: any head size up to 256, fp32 or bf16 inputs. The exact one of the
// two forwards, and the slow one: a block of 128 threads holds 32 value columns of the state of one head, four threads
// a column, each with every fourth key.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "furlong/ops/kda/cuda/token.cuh"

namespace furlong::kda::cuda {

namespace {

constexpr int kTokenThreads = 128;
constexpr int kParts = 4;  // threads of a column
constexpr int kColumns = kTokenThreads / kParts;
constexpr int kMaxKey = 256;

__device__ float element(const Rows& rows, int64_t token, int64_t head, int64_t i) {
  const int64_t at = token * rows.token_stride + head * rows.head_stride + i;
  return rows.type == Element::kFloat ? static_cast<const float*>(rows.data)[at]
                                      : __bfloat162float(static_cast<const __nv_bfloat16*>(rows.data)[at]);
}

/// e^decay_log of one channel.
__device__ float decay_of(const Inputs& in, int64_t token, int64_t head, int64_t channel) {
  const float z = element(in.gate_NHK, token, head, channel);
  if (in.gate_form == GateForm::kGiven) return expf(z);
  const float a = expf(in.a_log_H[head]), x = z + in.dt_bias_HK[head * in.key_size + channel];
  if (in.gate_form == GateForm::kBounded) return expf(in.lower_bound / (1.0f + expf(-a * x)));
  return expf(-a * (x > 20.0f ? x : log1pf(expf(x))));
}

struct Token {
  float q[kMaxKey], k[kMaxKey], decay[kMaxKey];
};

/// Sum of `x` over the block, the same order every time.
__device__ float block_sum(float x, float* partial) {
  for (int distance = 16; distance > 0; distance >>= 1) x += __shfl_xor_sync(0xffffffffu, x, distance);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  const float sum = (partial[0] + partial[1]) + (partial[2] + partial[3]);
  __syncthreads();
  return sum;
}

__device__ void load_token(const Inputs& in, int64_t token, int64_t head, Token& to, float* partial) {
  float qq = 0.0f, kk = 0.0f;
  for (int i = threadIdx.x; i < in.key_size; i += kTokenThreads) {
    to.q[i] = element(in.q_NHK, token, head, i);
    to.k[i] = element(in.k_NHK, token, head, i);
    to.decay[i] = decay_of(in, token, head, i);
    qq = fmaf(to.q[i], to.q[i], qq);
    kk = fmaf(to.k[i], to.k[i], kk);
  }
  float q_factor = in.scale, k_factor = 1.0f;
  if (in.l2_norm) {
    q_factor *= 1.0f / sqrtf(block_sum(qq, partial) + in.l2_eps);
    k_factor = 1.0f / sqrtf(block_sum(kk, partial) + in.l2_eps);
  }
  for (int i = threadIdx.x; i < in.key_size; i += kTokenThreads) {
    to.q[i] *= q_factor;
    to.k[i] *= k_factor;
  }
  __syncthreads();
}

__device__ float column_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ void put(const ForwardArgs& call, int64_t token, int64_t head, int64_t column, float value) {
  const int64_t at = (token * call.in.heads + head) * call.in.value_size + column;
  if (call.in.v_NHV.type == Element::kFloat) {
    static_cast<float*>(call.out_NHV)[at] = value;
  } else {
    static_cast<__nv_bfloat16*>(call.out_NHV)[at] = __float2bfloat16(value);
  }
}

template <int kKeys>  // keys a thread holds
__global__ void __launch_bounds__(kTokenThreads) token_kernel(const __grid_constant__ ForwardArgs call) {
  __shared__ Token now;
  __shared__ float partial[4];
  const Inputs& in = call.in;
  const int64_t sequence = blockIdx.y / in.heads, head = blockIdx.y % in.heads;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x / kParts;
  const int part = threadIdx.x % kParts;
  const bool valid = column < in.value_size;
  const int64_t first = in.offsets[sequence], last = in.offsets[sequence + 1];
  const int64_t state_size = in.key_size * in.value_size;
  const auto at = [&](int i) { return (static_cast<int64_t>(i) * kParts + part) * in.value_size + column; };
  const auto is_key = [&](int i) { return valid && i * kParts + part < in.key_size; };
  float state[kKeys];
  const float* initial = nullptr;
  if (call.initial_state_SHKV != nullptr) {
    const int64_t row = call.initial_slots_B != nullptr ? call.initial_slots_B[sequence] : sequence;
    initial = call.initial_state_SHKV + (row * in.heads + head) * state_size;
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) state[i] = initial != nullptr && is_key(i) ? initial[at(i)] : 0.0f;
  const auto store = [&](float* to) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (is_key(i)) to[at(i)] = state[i];
    }
  };
  for (int64_t token = first; token < last; ++token) {
    const int64_t chunk = (token - first) / kChunk;
    if (call.saved_state_XHKV != nullptr && (token - first) % kChunk == 0 && chunk % call.saved_every == 0) {
      store(call.saved_state_XHKV +
            (saved_row(first, sequence, chunk, call.saved_every) * in.heads + head) * state_size);
    }
    load_token(in, token, head, now, partial);
    const float v = valid ? element(in.v_NHV, token, head, column) : 0.0f;
    float beta = element(in.beta_NH, token, head, 0);
    if (in.beta_is_logit) beta = 1.0f / (1.0f + expf(-beta));
    float recall = 0.0f;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = i * kParts + part;
      if (key < in.key_size) {
        state[i] *= now.decay[key];
        recall = fmaf(state[i], now.k[key], recall);
      }
    }
    const float write = beta * (v - column_sum(recall));
    float out = 0.0f;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = i * kParts + part;
      if (key < in.key_size) {
        state[i] = fmaf(now.k[key], write, state[i]);
        out = fmaf(state[i], now.q[key], out);
      }
    }
    out = column_sum(out);
    if (valid && part == 0) put(call, token, head, column, out);
    __syncthreads();
  }
  if (call.final_state_SHKV != nullptr) {
    const int64_t row = call.final_slots_B != nullptr ? call.final_slots_B[sequence] : sequence;
    store(call.final_state_SHKV + (row * in.heads + head) * state_size);
  }
  if (!valid || part != 0) return;
  for (int64_t token = in.offsets[in.sequences] + sequence; token < in.tokens; token += in.sequences) {
    put(call, token, head, column, 0.0f);
  }
}

}  // namespace

int launch_token_forward(const ForwardArgs& args) {
  const Inputs& in = args.in;
  if (in.key_size > kMaxKey) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((in.value_size + kColumns - 1) / kColumns),
                  static_cast<unsigned>(in.sequences * in.heads));
  if (in.key_size <= 64) {
    token_kernel<16><<<grid, kTokenThreads, 0, args.stream>>>(args);
  } else if (in.key_size <= 128) {
    token_kernel<32><<<grid, kTokenThreads, 0, args.stream>>>(args);
  } else {
    token_kernel<64><<<grid, kTokenThreads, 0, args.stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace furlong::kda::cuda
