#include "furlong/ops/norm/norm.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

namespace furlong {
namespace {

TEST(RmsNorm, IsDifferentiable) {
  at::Tensor x = at::randn({5, 8}).requires_grad_();
  at::Tensor weight = at::ones({8}).requires_grad_();
  rms_norm(x, weight, 1e-5).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_TRUE(weight.grad().defined());
}

}  // namespace
}  // namespace furlong
