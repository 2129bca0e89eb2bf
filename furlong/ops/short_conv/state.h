#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

namespace furlong {

/// Pool of convolution tails [slot, kernel - 1, channels], newest last, raw inputs in the compute dtype.
struct ConvState {
  at::Tensor pool_STP;

  static ConvState allocate(int64_t slots, int64_t kernel, int64_t channels, at::ScalarType dtype, at::Device device) {
    return {at::zeros({slots, kernel - 1, channels}, at::TensorOptions().dtype(dtype).device(device))};
  }
  int64_t bytes_per_slot() const { return pool_STP.stride(0) * pool_STP.element_size(); }
};

}  // namespace furlong
