#pragma once

// Gradient of kda_chunk token by token, fp32, any size up to 256: one block a sequence and head. Slow and exact; what
// the tensor-core kernels do not take goes through here, and tests compare against it.
//
// The state is kept before every 64th token; the tokens of a span are run again with every state kept, then backwards:
//   D = d_S + scale q d_out^T,   e = v - S~^T k (S~ = decayed state),   x = D^T k
//   d_q = scale S d_out          d_v = beta x       d_beta = x . e
//   d_k = D (beta e) - S~ (beta x)                  d_S~ = D - k (beta x)^T
//   d_decay_log = sum_v d_S~ S~                     d_S <- exp(decay_log) d_S~

#include "furlong/ops/kda/cuda/backward_chunk.cuh"

namespace furlong::kda::cuda {

inline constexpr int kAnyThreads = 256;
inline constexpr int kAnyLargest = 256;

struct AnyWork {
  float* entering;  // [X, H, K, V]
  float* span;      // [B * H, 65, K, V]: the states inside the span at hand
  float* d_state;   // [B * H, K, V]
};

struct AnyShared {
  float q[kAnyLargest], k[kAnyLargest], decay[kAnyLargest], v[kAnyLargest], d_out[kAnyLargest], error[kAnyLargest],
      d_error[kAnyLargest], sums[kAnyThreads / 32];
};

FURLONG_DEVICE float warp_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

FURLONG_DEVICE float element(const Rows& x, int64_t n, int h, int64_t i) {
  const int64_t at = n * x.token_stride + h * x.head_stride + i;
  return x.type == Element::kBFloat16 ? __bfloat162float(static_cast<const bf16*>(x.data)[at])
                                      : static_cast<const float*>(x.data)[at];
}

FURLONG_DEVICE void put_element(void* to, int64_t at, Element type, float x) {
  if (type == Element::kBFloat16) {
    static_cast<bf16*>(to)[at] = __float2bfloat16(x);
  } else {
    static_cast<float*>(to)[at] = x;
  }
}

/// Token n into shared memory, and the error of its value against the decayed state.
FURLONG_DEVICE void load_token(const Inputs& in, const Rows* d_out, int64_t n, int h, const float* state,
                               AnyShared& s) {
  const int tid = thread_index(), K = static_cast<int>(in.key_size), V = static_cast<int>(in.value_size);
  sync_block();
  if (tid < K) {
    s.q[tid] = element(in.q_NHK, n, h, tid) * in.scale;
    s.k[tid] = element(in.k_NHK, n, h, tid);
    s.decay[tid] = expf(element(in.gate_NHK, n, h, tid));
  }
  if (tid < V) {
    s.v[tid] = element(in.v_NHV, n, h, tid);
    s.d_out[tid] = d_out == nullptr ? 0.0f : element(*d_out, n, h, tid);
  }
  sync_block();
  if (tid < V) {
    float recall = 0.0f;
    for (int d = 0; d < K; ++d) recall += s.decay[d] * state[d * V + tid] * s.k[d];
    s.error[tid] = s.v[tid] - recall;
  }
  sync_block();
}

/// next = state after the token in s.
FURLONG_DEVICE void advance(const Inputs& in, float beta, const float* state, float* next, const AnyShared& s) {
  const int V = static_cast<int>(in.value_size), size = static_cast<int>(in.key_size) * V;
  for (int i = thread_index(); i < size; i += kAnyThreads) {
    next[i] = s.decay[i / V] * state[i] + s.k[i / V] * beta * s.error[i % V];
  }
}

/// One token backwards: `state` before it, d_state after it, replaced by the one before.
FURLONG_DEVICE void retreat(const BackwardArgs& args, int64_t n, int h, float beta, const float* state, float* d_state,
                            AnyShared& s) {
  const Inputs& in = args.in;
  const int tid = thread_index(), lane = tid & 31, warp = tid >> 5;
  const int K = static_cast<int>(in.key_size), V = static_cast<int>(in.value_size);
  float d_beta = 0.0f;
  if (tid < V) {
    float x = 0.0f;
    for (int d = 0; d < K; ++d) {
      float& cell = d_state[d * V + tid];
      cell += s.q[d] * s.d_out[tid];
      x += cell * s.k[d];
    }
    s.d_error[tid] = beta * x;
    d_beta = x * s.error[tid];
    put_element(args.d_v_NHV, (n * in.heads + h) * V + tid, in.v_NHV.type, beta * x);
  }
  d_beta = warp_sum(d_beta);
  if (lane == 0) s.sums[warp] = d_beta;
  sync_block();
  if (tid == 0) {
    float sum = 0.0f;
    for (float part : s.sums) sum += part;
    put_element(args.d_beta_NH, n * in.heads + h, in.beta_NH.type, sum);
  }
  for (int d = warp; d < K; d += kAnyThreads / 32) {
    float d_q = 0.0f, d_k = 0.0f, d_g = 0.0f;
    for (int v = lane; v < V; v += 32) {
      float& cell = d_state[d * V + v];
      const float decayed = s.decay[d] * state[d * V + v], write = beta * s.error[v];
      d_q += (decayed + s.k[d] * write) * s.d_out[v];
      d_k += cell * write - decayed * s.d_error[v];
      const float d_decayed = cell - s.k[d] * s.d_error[v];
      d_g += d_decayed * decayed;
      cell = s.decay[d] * d_decayed;
    }
    d_q = warp_sum(d_q);
    d_k = warp_sum(d_k);
    d_g = warp_sum(d_g);
    if (lane == 0) {
      const int64_t at = (n * in.heads + h) * K + d;
      put_element(args.d_q_NHK, at, in.q_NHK.type, in.scale * d_q);
      put_element(args.d_k_NHK, at, in.q_NHK.type, d_k);
      put_element(args.d_gate_NHK, at, in.gate_NHK.type, d_g);
    }
  }
}

FURLONG_KERNEL void FURLONG_BOUNDS(kAnyThreads, 1) gradient_any(const BackwardArgs args, const AnyWork work) {
  const Inputs& in = args.in;
  AnyShared& s = *reinterpret_cast<AnyShared*>(shared_memory());
  const int heads = static_cast<int>(in.heads), b = block_index_x() / heads, h = block_index_x() % heads;
  const int64_t square = in.key_size * in.value_size, begin = in.offsets[b], end = in.offsets[b + 1];
  const int64_t chunks = (end - begin + kGradientChunk - 1) / kGradientChunk;
  float* span = work.span + block_index_x() * (kGradientChunk + 1) * square;
  float* d_state = work.d_state + block_index_x() * square;
  const float* initial =
      args.initial_state_BHKV == nullptr ? nullptr : args.initial_state_BHKV + block_index_x() * square;
  const float* last = args.d_final_state_BHKV == nullptr ? nullptr : args.d_final_state_BHKV + block_index_x() * square;
  const auto entering = [&](int64_t chunk) { return work.entering + (slot_of(begin, b, chunk) * heads + h) * square; };
  const auto copy = [&](float* to, const float* from) {
    sync_block();  // the last token's readers
    for (int64_t i = thread_index(); i < square; i += kAnyThreads) to[i] = from == nullptr ? 0.0f : from[i];
    sync_block();
  };
  copy(d_state, last);
  copy(span, initial);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    copy(entering(chunk), span);
    for (int64_t n = begin + chunk * kGradientChunk; n < end && n < begin + (chunk + 1) * kGradientChunk; ++n) {
      load_token(in, nullptr, n, h, span, s);
      advance(in, load_one(in.beta_NH, n, h), span, span, s);
    }
    sync_block();
  }
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t first = begin + chunk * kGradientChunk;
    const int64_t rows = end - first < kGradientChunk ? end - first : kGradientChunk;
    copy(span, entering(chunk));
    for (int64_t i = 0; i < rows; ++i) {
      load_token(in, nullptr, first + i, h, span + i * square, s);
      advance(in, load_one(in.beta_NH, first + i, h), span + i * square, span + (i + 1) * square, s);
    }
    for (int64_t i = rows - 1; i >= 0; --i) {
      load_token(in, &args.d_out_NHV, first + i, h, span + i * square, s);
      retreat(args, first + i, h, load_one(in.beta_NH, first + i, h), span + i * square, d_state, s);
    }
  }
  if (args.d_initial_state_BHKV != nullptr) copy(args.d_initial_state_BHKV + block_index_x() * square, d_state);
}

}  // namespace furlong::kda::cuda
