#include "furlong/ops/common/recycled.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace furlong {
namespace {

constexpr int64_t kMegabyte = int64_t{1} << 20;

at::Tensor bytes_of(int64_t megabytes) {
  return empty_recycled({megabytes * kMegabyte}, at::kByte);
}

/// Leaves nothing idle: a request larger than all of it gives it back first, and is itself too large to be kept.
void drop_idle() {
  bytes_of(kMostIdleBytes / kMegabyte + 1);
}

TEST(Recycled, HandsAFreedBlockOutAgain) {
  drop_idle();
  at::Tensor x = bytes_of(16);
  const void* first = x.data_ptr();
  x = at::Tensor();
  EXPECT_EQ(recycled_bytes().idle, 16 * kMegabyte);
  const at::Tensor slightly_smaller = bytes_of(15);
  EXPECT_EQ(slightly_smaller.data_ptr(), first);
  EXPECT_EQ(recycled_bytes().idle, 0);
}

TEST(Recycled, HoldsNoMoreThanWasInUseAtOnce) {
  drop_idle();
  const int64_t before = recycled_bytes().in_use;
  for (const int64_t megabytes : {32, 8, 20, 3, 31, 12}) {
    bytes_of(megabytes);
    EXPECT_LE(recycled_bytes().idle, 32 * kMegabyte);
  }
  EXPECT_EQ(recycled_bytes().in_use, before);
}

TEST(Recycled, KeepsABoundedNumberOfBytes) {
  drop_idle();
  std::vector<at::Tensor> blocks;
  for (int64_t i = 0; i < kMostIdleBytes / kMegabyte / 32 + 4; ++i) blocks.push_back(bytes_of(32));
  blocks.clear();
  EXPECT_EQ(recycled_bytes().idle, kMostIdleBytes);
  drop_idle();
  EXPECT_EQ(recycled_bytes().idle, 0);
}

TEST(Recycled, IsAnOrdinaryTensor) {
  at::Tensor x = empty_recycled({3, 1 << 19}, at::kFloat);
  EXPECT_TRUE(x.is_contiguous());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(x.data_ptr()) % 64, 0u);
  x.fill_(2.0);
  x.resize_({4, 1 << 19});
  EXPECT_EQ(x.slice(0, 0, 3).sum().item<double>(), 6.0 * (1 << 19));
  EXPECT_EQ(empty_recycled({0, 7}, at::kFloat).numel(), 0);
}

}  // namespace
}  // namespace furlong
