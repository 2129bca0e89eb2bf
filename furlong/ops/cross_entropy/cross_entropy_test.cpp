#include "furlong/ops/cross_entropy/cross_entropy.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>

#include "furlong/base/error.h"
#include "furlong/ops/cross_entropy/reference.h"
#include "tests/support/gradient.h"
#include "tests/support/simd_targets.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using testing::finite_difference_error;
using testing::Function;
using testing::gradients;
using testing::on_every_simd_target;
using testing::Tensors;
using testing::to_dtype;

struct Batch {
  at::Tensor hidden, head, targets, weight;
};

Batch make_batch(int64_t tokens, int64_t size, int64_t vocabulary) {
  return {at::randn({tokens, size}), at::randn({vocabulary, size}), at::randint(vocabulary, {tokens}, at::kLong),
          at::rand({tokens}) + 0.1};
}

/// The loss as a function of hidden and head.
Function loss_of(const Batch& batch) {
  return
      [batch](const Tensors& t) { return std::get<0>(linear_cross_entropy(t[0], t[1], batch.targets, batch.weight)); };
}

Function reference_of(const Batch& batch) {
  return [batch](const Tensors& t) {
    return std::get<0>(linear_cross_entropy_reference(t[0], t[1], batch.targets, batch.weight));
  };
}

void expect_matches_reference(const Batch& batch, double values, double grads) {
  const Tensors inputs = {batch.hidden, batch.head};
  const Tensors wide = to_dtype(inputs, at::kDouble);
  const auto [loss, nll] = linear_cross_entropy(batch.hidden, batch.head, batch.targets, batch.weight);
  const auto [loss_wide, nll_wide] = linear_cross_entropy_reference(wide[0], wide[1], batch.targets, batch.weight);
  EXPECT_CLOSE(loss, loss_wide, values);
  EXPECT_CLOSE(nll, nll_wide, values);
  const at::Tensor cotangent = at::ones({}) * 0.7;
  const Tensors got = gradients(loss_of(batch), inputs, cotangent);
  const Tensors expected = gradients(reference_of(batch), wide, cotangent);
  EXPECT_CLOSE(got[0], expected[0], grads);
  EXPECT_CLOSE(got[1], expected[1], grads);
}

TEST(LinearCrossEntropy, MatchesReferenceInOneChunkAndInSeveral) {
  for (const auto& [tokens, vocabulary] : {std::pair<int64_t, int64_t>{5, 11}, {40, 64}, {2100, 37}, {1, 1}}) {
    SCOPED_TRACE(std::string("N") + std::to_string(tokens) + "_V" + std::to_string(vocabulary));
    expect_matches_reference(make_batch(tokens, 16, vocabulary), tolerance::kFp32, tolerance::kFp32Chain);
  }
}

TEST(LinearCrossEntropy, MatchesReferenceOnEverySimdTarget) {
  const Batch batch = make_batch(40, 16, 37);
  on_every_simd_target([&] { expect_matches_reference(batch, tolerance::kFp32, tolerance::kFp32Chain); });
}

TEST(LinearCrossEntropy, Bf16MatchesReference) {
  Batch batch = make_batch(1100, 16, 50);
  batch.hidden = batch.hidden.to(at::kBFloat16);
  batch.head = batch.head.to(at::kBFloat16).to(at::kFloat);  // an fp32 master, cast inside
  expect_matches_reference(batch, tolerance::kBf16, tolerance::kBf16Chain);
}

TEST(LinearCrossEntropy, GradientOfReferenceMatchesFiniteDifferences) {
  const Batch batch = make_batch(4, 3, 5);
  const Tensors inputs = to_dtype({batch.hidden, batch.head}, at::kDouble);
  const at::Tensor one = at::ones({}, at::kDouble);
  EXPECT_LE(finite_difference_error(reference_of(batch), inputs, one), tolerance::kFiniteDifference);
  EXPECT_LE(finite_difference_error(loss_of(batch), inputs, one), tolerance::kFiniteDifference);
}

TEST(LinearCrossEntropy, IgnoredTokensAreNeverRead) {
  Batch batch = make_batch(50, 8, 20);
  const at::Tensor kept = at::rand({50}) > 0.5;
  batch.weight = batch.weight * kept;
  const Batch clean = batch;
  batch.hidden = batch.hidden.clone();
  batch.targets = batch.targets.clone();
  for (int64_t n = 0; n < 50; ++n) {
    if (kept[n].item<bool>()) continue;
    batch.hidden[n].fill_(std::numeric_limits<float>::quiet_NaN());
    batch.targets[n] = -100;
  }
  const auto [loss, nll] = linear_cross_entropy(batch.hidden, batch.head, batch.targets, batch.weight);
  const auto [loss_clean, nll_clean] = linear_cross_entropy(clean.hidden, clean.head, clean.targets, clean.weight);
  EXPECT_TRUE(at::equal(loss, loss_clean) && at::equal(nll, nll_clean));
  EXPECT_EQ((nll * kept.logical_not()).abs().max().item<float>(), 0.0f);
  const Tensors got = gradients(loss_of(batch), {batch.hidden, batch.head}, at::ones({}));
  const Tensors expected =
      gradients(reference_of(clean), to_dtype({clean.hidden, clean.head}, at::kDouble), at::ones({}));
  EXPECT_CLOSE(got[0], expected[0], tolerance::kFp32Chain);
  EXPECT_CLOSE(got[1], expected[1], tolerance::kFp32Chain);
  EXPECT_EQ((got[0] * kept.logical_not().unsqueeze(1)).abs().max().item<float>(), 0.0f);
}

TEST(LinearCrossEntropy, LossWithoutGradientHasTheSameBits) {
  const Batch batch = make_batch(30, 8, 21);
  const auto [loss, nll] = linear_cross_entropy(batch.hidden, batch.head, batch.targets, batch.weight);
  const at::Tensor hidden = batch.hidden.clone().requires_grad_();
  const auto [loss_grad, nll_grad] = linear_cross_entropy(hidden, batch.head, batch.targets, batch.weight);
  EXPECT_TRUE(at::equal(loss, loss_grad) && at::equal(nll, nll_grad));
  EXPECT_FALSE(nll_grad.requires_grad());
}

TEST(LinearCrossEntropy, SurvivesHugeLogitsAndKeepsNan) {
  Batch batch = make_batch(20, 8, 33);
  batch.hidden = batch.hidden * 1e4;
  const Tensors grads = gradients(loss_of(batch), {batch.hidden, batch.head}, at::ones({}));
  EXPECT_TRUE(grads[0].isfinite().all().item<bool>() && grads[1].isfinite().all().item<bool>());
  batch.hidden[3][2] = std::numeric_limits<float>::quiet_NaN();
  const auto [loss, nll] = linear_cross_entropy(batch.hidden, batch.head, batch.targets, batch.weight);
  EXPECT_TRUE(loss.isnan().item<bool>());
  EXPECT_EQ(nll.isnan().sum().item<int64_t>(), 1);
}

TEST(LinearCrossEntropy, HandlesEmptyBatchesAndBatchesWithoutACountedToken) {
  for (const int64_t tokens : {0, 4}) {
    Batch batch = make_batch(tokens, 8, 9);
    batch.weight = at::zeros({tokens});
    const auto [loss, nll] = linear_cross_entropy(batch.hidden, batch.head, batch.targets, batch.weight);
    EXPECT_EQ(loss.item<float>(), 0.0f);
    EXPECT_EQ(nll.sizes(), at::IntArrayRef({tokens}));
    const Tensors grads = gradients(loss_of(batch), {batch.hidden, batch.head}, at::ones({}));
    EXPECT_EQ(grads[0].sizes(), batch.hidden.sizes());
    EXPECT_EQ(grads[1].abs().max().item<float>(), 0.0f);
  }
}

TEST(LinearCrossEntropy, RefusesBadArguments) {
  const Batch batch = make_batch(4, 8, 9);
  EXPECT_THROW(linear_cross_entropy(batch.hidden, at::randn({9, 7}), batch.targets, batch.weight), UsageError);
  EXPECT_THROW(linear_cross_entropy(batch.hidden, batch.head, batch.targets.slice(0, 1), batch.weight), UsageError);
  EXPECT_THROW(linear_cross_entropy(batch.hidden, batch.head, batch.weight, batch.weight), UsageError);
  at::Tensor targets = batch.targets.clone();
  targets[2] = 9;
  try {
    linear_cross_entropy(batch.hidden, batch.head, targets, batch.weight);
    FAIL() << "a target of 9 in a vocabulary of 9 must be refused";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "[linear_cross_entropy] targets_N: got 9, need at least 0 and less than 9");
  }
}

}  // namespace
}  // namespace furlong
