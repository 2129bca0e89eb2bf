#pragma once

#include <ATen/core/Tensor.h>

namespace furlong {

/// Pool of latent caches [slot, capacity, L + R] in the compute dtype. Capacity grows by doubling; entries past a
/// sequence's length are undefined.
class LatentCache {
 public:
  static LatentCache allocate(int64_t slots, int64_t width, at::ScalarType dtype, at::Device device);
  /// Makes room for `tokens` in every slot.
  void reserve(int64_t tokens);
  int64_t capacity() const { return pool_SCE.size(1); }
  int64_t bytes_per_token() const { return pool_SCE.size(2) * pool_SCE.element_size(); }

  at::Tensor pool_SCE;
};

}  // namespace furlong
