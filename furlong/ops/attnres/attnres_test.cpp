#include "furlong/ops/attnres/attnres.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

namespace furlong {
namespace {

TEST(AttnResRead, OneSourceIsTheIdentity) {
  const at::Tensor v = at::randn({5, 8});
  const auto [out, p] = attnres_read({v}, at::randn({8}), 1e-5);
  EXPECT_TRUE(at::equal(out, v));
  EXPECT_TRUE(p.eq(1.0).all().item<bool>());
}

}  // namespace
}  // namespace furlong
