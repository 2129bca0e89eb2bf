#pragma once

// What a sequence remembers in one KDA layer.
//   S slots   H heads   K key size   V value size

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "furlong/ops/short_conv/state.h"

namespace furlong {

/// Pool of recurrent states. The layout [slot, H, K, V], fp32, contiguous, is fixed everywhere.
struct KdaState {
  at::Tensor pool_SHKV;

  static KdaState allocate(int64_t slots, int64_t heads, int64_t key_size, int64_t value_size, at::Device device) {
    return {at::zeros({slots, heads, key_size, value_size}, at::TensorOptions().dtype(at::kFloat).device(device))};
  }
  int64_t bytes_per_slot() const { return pool_SHKV.stride(0) * 4; }
};

/// All of one layer: the recurrent state and the convolution tail of q, k and v.
struct KdaLayerState {
  KdaState recurrent;
  ConvState conv;
};

}  // namespace furlong
