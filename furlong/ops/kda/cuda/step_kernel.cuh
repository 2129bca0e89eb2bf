#pragma once

// One token of a (sequence, head): the state is read once into registers, corrected there and written once. Columns of
// the state are independent, so a block takes a strip of them and all K rows. With S' = diag(decay) S and
// w = beta (v - S'^T k),
//
//   out = scale (S' + k w^T)^T q = scale (S'^T q + (q . k) w)
//
// so that one reduction over the rows gives both S'^T k and S'^T q.

#include <cstdint>

#include "furlong/ops/kda/cuda/args.h"
#include "furlong/ops/kda/cuda/gate.cuh"

namespace furlong::kda::cuda {

constexpr int kStepMaxKeys = 256;
// Heads between a block and the state that it prefetches: about one a multiprocessor. 64 to 200 were within 3 %; none
// at all cost 2 % (strips of 64 columns) to 8 % (32).
constexpr int64_t kStepAhead = 132;

/// A block's shape. kRows K rows and 4 adjacent columns a thread; kWhole: K and V are multiples of the shape and
/// addresses of 16 bytes, otherwise each element is masked. kResident: threads of a multiprocessor that must fit.
template <int kThreadsValue, int kStripValue, int kRowsValue, bool kWholeValue, int kResidentValue>
struct StepShape {
  static constexpr int kThreads = kThreadsValue, kStrip = kStripValue, kRows = kRowsValue;
  static constexpr int kResident = kResidentValue;
  static constexpr bool kWhole = kWholeValue;
  static constexpr int kQuads = kStrip / 4, kGroups = kThreads / kQuads, kKeys = kGroups * kRows;
  static constexpr int kWarps = kThreads / 32;
  static_assert(kQuads <= 32 && kKeys <= kStepMaxKeys);
};

struct StepRow {
  float keep, shift, k, q;
};

template <class Shape>
struct StepShared {
  StepRow row[Shape::kKeys];
  float dots[3][Shape::kWarps];  // q.q, k.k, q.k
  float4 sums[2][Shape::kWarps][Shape::kQuads];
};

/// 16 bytes past L1: every state is read once.
__device__ inline float4 load_state(const float* p) {
  float4 x;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(p)
               : "memory");
  return x;
}

/// Past the caches' usual order: what is written is not read again in this launch.
__device__ inline void store_state(float* p, float4 x) {
  __stcs(reinterpret_cast<float4*>(p), x);
}

/// Asks for the state of a later head to come into L2: its own block then waits for L2 instead of memory.
__device__ inline void prefetch_state(const StepArgs& args, int64_t head_index) {
  const Inputs& in = args.in;
  if (head_index >= in.sequences * in.heads) return;
  const int64_t slot = args.slots_B[head_index / in.heads];
  if (slot < 0 || slot >= args.slots) return;
  const int64_t size = in.key_size * in.value_size;
  const float* state = args.state_SHKV + (slot * in.heads + head_index % in.heads) * size;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(state), "r"(static_cast<int>(size * sizeof(float)))
               : "memory");
}

__device__ inline float4 fma4(float a, float4 x, float4 y) {
  return {fmaf(a, x.x, y.x), fmaf(a, x.y, y.y), fmaf(a, x.z, y.z), fmaf(a, x.w, y.w)};
}

__device__ inline float4 add4(float4 x, float4 y) {
  return {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
}

template <int kFrom>
__device__ inline float4 lane_sum4(float4 x) {
  return {gpu::lane_sum<kFrom>(x.x), gpu::lane_sum<kFrom>(x.y), gpu::lane_sum<kFrom>(x.z), gpu::lane_sum<kFrom>(x.w)};
}

__device__ inline float load(const Rows& rows, int64_t b, int64_t h, int64_t i) {
  return gpu::load_element(rows.data, b * rows.token_stride + h * rows.head_stride + i,
                           rows.type == Element::kBFloat16);
}

__device__ inline float load_decay_log(const Inputs& in, int64_t b, int h, int d, float a) {
  const float gate = load(in.gate_NHK, b, h, d);
  if (in.gate_form == GateForm::kGiven) return gate;
  const float biased = gate + in.dt_bias_HK[h * in.key_size + d];
  return in.gate_form == GateForm::kBounded ? gate_bounded(biased, a, in.lower_bound) : gate_softplus(biased, a);
}

/// Gates, keys and queries of one head into shared memory, and the block's partial dot products.
template <class Shape>
__device__ inline void stage_token(const Inputs& in, int64_t b, int h, StepShared<Shape>& shared) {
  const float a = in.gate_form == GateForm::kGiven ? 0.0f : expf(in.a_log_H[h]);
  float qq = 0, kk = 0, qk = 0;
  for (int d = threadIdx.x; d < Shape::kKeys; d += Shape::kThreads) {
    StepRow row{1.0f, 0.0f, 0.0f, 0.0f};
    if (Shape::kWhole || d < in.key_size) {
      row.q = load(in.q_NHK, b, h, d);
      row.k = load(in.k_NHK, b, h, d);
      const Decay decay = decay_of(load_decay_log(in, b, h, d, a));
      row.keep = decay.keep;
      row.shift = decay.shift;
    }
    shared.row[d] = row;
    qq = fmaf(row.q, row.q, qq);
    kk = fmaf(row.k, row.k, kk);
    qk = fmaf(row.q, row.k, qk);
  }
  qq = gpu::lane_sum<1>(qq);
  kk = gpu::lane_sum<1>(kk);
  qk = gpu::lane_sum<1>(qk);
  if (threadIdx.x % 32 == 0) {
    const int warp = threadIdx.x / 32;
    shared.dots[0][warp] = qq;
    shared.dots[1][warp] = kk;
    shared.dots[2][warp] = qk;
  }
}

/// What multiplies the raw q and k, and their product after that.
struct TokenScales {
  float q, k, qk;
};

template <class Shape>
__device__ inline TokenScales token_scales(const Inputs& in, const StepShared<Shape>& shared) {
  float dots[3] = {0, 0, 0};
#pragma unroll
  for (int warp = 0; warp < Shape::kWarps; ++warp) {
    for (int i = 0; i < 3; ++i) dots[i] += shared.dots[i][warp];
  }
  const float q = in.scale * (in.l2_norm ? rsqrtf(dots[0] + in.l2_eps) : 1.0f);
  const float k = in.l2_norm ? rsqrtf(dots[1] + in.l2_eps) : 1.0f;
  return {q, k, q * k * dots[2]};
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident / Shape::kThreads)
    step_kernel(const StepArgs args) {
  const Inputs& in = args.in;
  __shared__ StepShared<Shape> shared;
  const int V = static_cast<int>(in.value_size), strips = (V + Shape::kStrip - 1) / Shape::kStrip;
  const int64_t head_index = blockIdx.x / strips;
  const int strip = static_cast<int>(blockIdx.x % strips);
  const int64_t b = head_index / in.heads;
  const int h = static_cast<int>(head_index % in.heads);
  const int quad = threadIdx.x % Shape::kQuads, group = threadIdx.x / Shape::kQuads;
  const int column = strip * Shape::kStrip + quad * 4;
  float* const state = args.state_SHKV +
                       (gpu::checked_slot(args.slots_B[b], args.slots, "kda_step_") * in.heads + h) * in.key_size * V +
                       column;

  if (Shape::kWhole && strip == 0 && threadIdx.x == 0) prefetch_state(args, head_index + kStepAhead);
  // All loads of the state leave before anything waits.
  float4 s[Shape::kRows];
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i) {
    const int d = group + i * Shape::kGroups;
    const float* p = state + static_cast<int64_t>(d) * V;
    if (Shape::kWhole) {
      s[i] = load_state(p);
    } else {
      const bool row = d < in.key_size;
      s[i] = {row && column < V ? p[0] : 0.0f, row && column + 1 < V ? p[1] : 0.0f, row && column + 2 < V ? p[2] : 0.0f,
              row && column + 3 < V ? p[3] : 0.0f};
    }
  }
  float v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    v[j] = Shape::kWhole || column + j < V ? load(in.v_NHV, b, h, column + j) : 0.0f;
  }
  float beta = load(in.beta_NH, b, h, 0);
  if (in.beta_is_logit) beta = gpu::sigmoid(beta);
  stage_token<Shape>(in, b, h, shared);
  __syncthreads();
  const TokenScales scales = token_scales(in, shared);

  float4 recalled{0, 0, 0, 0}, read{0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i) {
    const StepRow row = shared.row[group + i * Shape::kGroups];
    const float4 kept{row.keep * s[i].x, row.keep * s[i].y, row.keep * s[i].z, row.keep * s[i].w};
    s[i] = fma4(row.shift, s[i], kept);
    recalled = fma4(row.k, s[i], recalled);
    read = fma4(row.q, s[i], read);
  }
  recalled = lane_sum4<Shape::kQuads>(recalled);
  read = lane_sum4<Shape::kQuads>(read);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 < Shape::kQuads) {
    shared.sums[0][warp][quad] = recalled;
    shared.sums[1][warp][quad] = read;
  }
  __syncthreads();
  recalled = shared.sums[0][0][quad];
  read = shared.sums[1][0][quad];
#pragma unroll
  for (int other = 1; other < Shape::kWarps; ++other) {
    recalled = add4(recalled, shared.sums[0][other][quad]);
    read = add4(read, shared.sums[1][other][quad]);
  }

  const float4 write{beta * fmaf(-scales.k, recalled.x, v[0]), beta * fmaf(-scales.k, recalled.y, v[1]),
                     beta * fmaf(-scales.k, recalled.z, v[2]), beta * fmaf(-scales.k, recalled.w, v[3])};
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i) {
    const int d = group + i * Shape::kGroups;
    const float4 updated = fma4(scales.k * shared.row[d].k, write, s[i]);
    float* p = state + static_cast<int64_t>(d) * V;
    if (Shape::kWhole) {
      store_state(p, updated);
    } else if (d < in.key_size) {
      const float values[4] = {updated.x, updated.y, updated.z, updated.w};
      for (int j = 0; j < 4 && column + j < V; ++j) p[j] = values[j];
    }
  }
  if (group == 0) {
    const float out[4] = {fmaf(scales.q, read.x, scales.qk * write.x), fmaf(scales.q, read.y, scales.qk * write.y),
                          fmaf(scales.q, read.z, scales.qk * write.z), fmaf(scales.q, read.w, scales.qk * write.w)};
    const int64_t row = head_index * V + column;
    for (int j = 0; j < 4 && column + j < V; ++j)
      gpu::store_element(args.out_BHV, row + j, in.v_NHV.type == Element::kBFloat16, out[j]);
  }
}

}  // namespace furlong::kda::cuda
