#pragma once

// How often each index occurs. at::bincount reads the largest index on the host, which on a GPU waits for the device.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

#include <cstdint>

namespace furlong {

/// Counts [size], int64, of the values of `indices` (int64, any shape), each in [0, size); integer sums, so the order
/// of the additions does not matter. No host wait.
inline at::Tensor index_counts(const at::Tensor& indices, int64_t size) {
  const at::Tensor flat = indices.reshape(-1);
  return at::zeros({size}, flat.options()).scatter_add_(0, flat, at::ones_like(flat));
}

}  // namespace furlong
