#pragma once

// The decay gates on one element, and the decay as a pair that keeps its accuracy near 1.

#include "furlong/ops/common/cuda_device.cuh"

namespace furlong::kda::cuda {

/// decay_log = lower_bound sigmoid(a (z + dt_bias)), a = exp(a_log).
__device__ inline float gate_bounded(float biased, float a, float lower_bound) {
  return lower_bound * gpu::sigmoid(a * biased);
}

/// decay_log = -a softplus(z + dt_bias); softplus is linear above 20.
__device__ inline float gate_softplus(float biased, float a) {
  return -a * (biased > 20.0f ? biased : log1pf(expf(biased)));
}

/// decay x = keep x + shift x. exp(decay_log) rounded to fp32 is off by up to 2^-25 near 1, always the same way for a
/// constant gate: 1e-4 after 4096 tokens. There keep is 1 and shift = decay - 1, exact to its own last bit.
struct Decay {
  float keep, shift;
};

__device__ inline Decay decay_of(float decay_log) {
  return decay_log > -0.5f ? Decay{1.0f, expm1f(decay_log)} : Decay{0.0f, expf(decay_log)};
}

}  // namespace furlong::kda::cuda
