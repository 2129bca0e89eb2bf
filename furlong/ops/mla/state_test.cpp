#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "furlong/ops/mla/state.h"

namespace furlong {
namespace {

TEST(LatentCache, GrowsByDoublingAndKeepsWhatItHolds) {
  LatentCache cache = LatentCache::allocate(2, 5, at::kBFloat16, at::kCPU);
  EXPECT_EQ(cache.bytes_per_token(), 10);
  cache.reserve(20);
  EXPECT_EQ(cache.capacity(), 20);
  const at::Tensor held = at::randn({2, 20, 5}, at::kBFloat16);
  cache.pool_SCE.copy_(held);
  cache.reserve(20);
  EXPECT_EQ(cache.capacity(), 20);
  cache.reserve(21);
  EXPECT_EQ(cache.capacity(), 40);
  EXPECT_TRUE(cache.pool_SCE.narrow(1, 0, 20).equal(held));
}

}  // namespace
}  // namespace furlong
