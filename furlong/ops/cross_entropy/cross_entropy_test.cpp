#include "furlong/ops/cross_entropy/cross_entropy.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

namespace furlong {
namespace {

TEST(LinearCrossEntropy, IsDifferentiable) {
  at::Tensor hidden = at::randn({5, 8}).requires_grad_();
  at::Tensor head = at::randn({11, 8}).requires_grad_();
  const auto [loss, nll] = linear_cross_entropy(hidden, head, at::randint(11, {5}, at::kLong), at::ones({5}));
  loss.backward();
  EXPECT_TRUE(hidden.grad().defined());
  EXPECT_TRUE(head.grad().defined());
}

}  // namespace
}  // namespace furlong
