#include "furlong/ops/mla/state.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "furlong/base/shape.h"

namespace furlong {

LatentCache LatentCache::allocate(int64_t slots, int64_t width, at::ScalarType dtype, at::Device device) {
  check_argument(slots >= 0 && width > 0, "LatentCache", "slots and width must not be negative");
  LatentCache cache;
  cache.pool_SCE = at::empty({slots, 0, width}, at::TensorOptions().dtype(dtype).device(device));
  return cache;
}

void LatentCache::reserve(int64_t tokens) {
  constexpr int64_t kSmallest = 16;
  if (tokens <= capacity()) return;
  const int64_t grown_capacity = std::max({tokens, 2 * capacity(), kSmallest});
  at::Tensor grown = at::empty({pool_SCE.size(0), grown_capacity, pool_SCE.size(2)}, pool_SCE.options());
  grown.narrow(1, 0, capacity()).copy_(pool_SCE);
  pool_SCE = grown;
}

}  // namespace furlong
