#include "furlong/ops/mla/mla.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>

#include "furlong/base/error.h"
#include "furlong/ops/common/kernel.h"
#include "tests/support/gradient.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using testing::finite_difference_error;
using testing::gradients;
using testing::Tensors;
using testing::to_dtype;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kScale = 0.3;

at::Tensor attention_reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const SequenceLayout& layout) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double);
  return find_op<Signature>("furlong::mla_attention_reference").call(q, k, v, layout.offsets_host(), kScale);
}

at::Tensor absorbed_reference(const at::Tensor& q, const at::Tensor& cache, const SequenceLayout& layout,
                              int64_t latent) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, int64_t, double);
  return find_op<Signature>("furlong::mla_absorbed_reference")
      .call(q, cache, layout.offsets(), layout.slots(), layout.past(), latent, kScale);
}

Tensors attention_inputs(int64_t tokens, int64_t heads, int64_t key, int64_t value) {
  return {at::randn({tokens, heads, key}), at::randn({tokens, heads, key}), at::randn({tokens, heads, value})};
}

const std::vector<std::vector<int64_t>> kRaggedBatches = {{1}, {7}, {5, 5, 5}, {3, 0, 3, 1, 17, 17}, {70, 33}};

TEST(MlaAttention, MatchesReferenceOnRaggedBatches) {
  for (const auto& lengths : kRaggedBatches) {
    const auto layout = SequenceLayout::from_lengths(lengths);
    const Tensors in = attention_inputs(layout.num_tokens(), 3, 24, 16);
    const Tensors wide = to_dtype(in, at::kDouble);
    EXPECT_CLOSE(mla_attention(in[0], in[1], in[2], layout, kScale),
                 attention_reference(wide[0], wide[1], wide[2], layout), tolerance::kFp32);
    const Tensors narrow = to_dtype(in, at::kBFloat16);
    EXPECT_CLOSE(
        mla_attention(narrow[0], narrow[1], narrow[2], layout, kScale),
        attention_reference(narrow[0].to(at::kFloat), narrow[1].to(at::kFloat), narrow[2].to(at::kFloat), layout),
        2 * tolerance::kBf16);  // the library rounds the probabilities to bf16 as well
  }
}

TEST(MlaAttention, GradientMatchesReference) {
  for (const auto& lengths : kRaggedBatches) {
    const auto layout = SequenceLayout::from_lengths(lengths);
    const Tensors in = attention_inputs(layout.num_tokens(), 2, 24, 16);
    const at::Tensor cotangent = at::randn({layout.num_tokens(), 2, 16});
    const Tensors got =
        gradients([&](const Tensors& t) { return mla_attention(t[0], t[1], t[2], layout, kScale); }, in, cotangent);
    const Tensors expected = gradients([&](const Tensors& t) { return attention_reference(t[0], t[1], t[2], layout); },
                                       to_dtype(in, at::kDouble), cotangent);
    for (size_t i = 0; i < in.size(); ++i) EXPECT_CLOSE(got[i], expected[i], tolerance::kFp32Chain);
  }
}

TEST(MlaAttention, ReferenceGradientMatchesFiniteDifferences) {
  const auto layout = SequenceLayout::from_lengths({3, 1});
  const Tensors in = to_dtype(attention_inputs(4, 2, 4, 3), at::kDouble);
  const double error =
      finite_difference_error([&](const Tensors& t) { return attention_reference(t[0], t[1], t[2], layout); }, in,
                              at::randn({4, 2, 3}, at::kDouble));
  EXPECT_LE(error, 1e-7);
}

TEST(MlaAttention, NeverReadsRowsPastTheLastSequence) {
  const auto layout = SequenceLayout::from_lengths({4, 3});
  Tensors in = attention_inputs(7, 2, 6, 4), poisoned;
  for (const at::Tensor& x : in) poisoned.push_back(at::cat({x, at::full({3, x.size(1), x.size(2)}, kNaN)}));
  for (at::Tensor& x : poisoned) x = x.to(at::kFloat).requires_grad_();
  const at::Tensor out = mla_attention(poisoned[0], poisoned[1], poisoned[2], layout, kScale);
  EXPECT_TRUE(out.narrow(0, 0, 7).equal(mla_attention(in[0], in[1], in[2], layout, kScale)));
  EXPECT_EQ(out.narrow(0, 7, 3).abs().max().item<float>(), 0.0f);
  out.sum().backward();
  for (const at::Tensor& x : poisoned) {
    EXPECT_EQ(x.grad().narrow(0, 7, 3).abs().max().item<float>(), 0.0f);
    EXPECT_TRUE(x.grad().isfinite().all().item<bool>());
  }
}

TEST(MlaAttention, HandlesEmptyAndOneToken) {
  const Tensors in = attention_inputs(1, 2, 6, 4);
  EXPECT_CLOSE(mla_attention(in[0], in[1], in[2], SequenceLayout::from_lengths({1}), kScale), in[2], tolerance::kFp32);
  const Tensors empty = attention_inputs(0, 2, 6, 4);
  EXPECT_EQ(mla_attention(empty[0], empty[1], empty[2], SequenceLayout::from_lengths({}), kScale).sizes(),
            (std::vector<int64_t>{0, 2, 4}));
}

TEST(MlaAttention, RefusesBadShapes) {
  const Tensors in = attention_inputs(4, 2, 6, 4);
  const auto layout = SequenceLayout::from_lengths({4});
  EXPECT_THROW(mla_attention(in[0], in[1].narrow(0, 0, 3), in[2], layout, kScale), UsageError);
  EXPECT_THROW(mla_attention(in[0], in[1], in[2].to(at::kDouble), layout, kScale), UsageError);
  EXPECT_THROW(mla_attention(in[0], in[1], in[2], SequenceLayout::from_lengths({5}), kScale), UsageError);
}

/// A pool whose entries past each sequence's length are NaN.
at::Tensor poisoned_cache(const SequenceLayout& layout, int64_t slots, int64_t capacity, int64_t width) {
  at::Tensor cache = at::full({slots, capacity, width}, kNaN).to(at::kFloat);
  for (int64_t b = 0; b < layout.num_sequences(); ++b) {
    const int64_t length = layout.past(b) + layout.length(b);
    cache.select(0, layout.slot(b)).narrow(0, 0, length).copy_(at::randn({length, width}));
  }
  return cache;
}

TEST(MlaAbsorbed, MatchesReference) {
  // Spans hold 4096 entries and groups 16 rows: one past both, several tokens, an empty sequence.
  const auto layout = SequenceLayout::with_state({1, 3, 0, 2}, {2, 0, 3, 1}, {0, 40, 5, 4100});
  for (const int64_t heads : {1, 5, 16, 18}) {
    const at::Tensor cache = poisoned_cache(layout, 4, 4200, 44), q = at::randn({6, heads, 44});
    const at::Tensor expected = absorbed_reference(q.to(at::kDouble), cache.to(at::kDouble), layout, 33);
    EXPECT_CLOSE(mla_absorbed(q, cache, layout, 33, kScale), expected, tolerance::kFp32Chain);
    const at::Tensor cache_bf16 = cache.to(at::kBFloat16), q_bf16 = q.to(at::kBFloat16);
    const at::Tensor rounded = absorbed_reference(q_bf16.to(at::kDouble), cache_bf16.to(at::kDouble), layout, 33);
    EXPECT_CLOSE(mla_absorbed(q_bf16.to(at::kFloat), cache_bf16, layout, 33, kScale), rounded, tolerance::kFp32Chain);
    EXPECT_CLOSE(mla_absorbed(q_bf16, cache_bf16, layout, 33, kScale), rounded, tolerance::kBf16);
  }
}

TEST(MlaAbsorbed, SurvivesLargeScores) {
  const auto layout = SequenceLayout::with_state({1}, {0}, {99});
  const at::Tensor cache = at::randn({1, 100, 20}) * 100, q = at::randn({1, 4, 20}) * 100;
  const at::Tensor expected = absorbed_reference(q.to(at::kDouble), cache.to(at::kDouble), layout, 16);
  EXPECT_CLOSE(mla_absorbed(q, cache, layout, 16, kScale), expected, tolerance::kFp32Chain);
}

TEST(MlaAbsorbed, LeavesRowsPastTheLastSequenceZero) {
  const auto layout = SequenceLayout::with_state({2}, {0}, {3});
  const at::Tensor cache = poisoned_cache(layout, 1, 8, 12);
  const at::Tensor q = at::cat({at::randn({2, 3, 12}), at::full({2, 3, 12}, kNaN).to(at::kFloat)});
  for (const at::Tensor& u : {mla_absorbed(q, cache, layout, 8, kScale), absorbed_reference(q, cache, layout, 8)}) {
    EXPECT_TRUE(u.isfinite().all().item<bool>());
    EXPECT_EQ(u.narrow(0, 2, 2).abs().max().item<float>(), 0.0f);
  }
}

TEST(MlaAbsorbed, RefusesBadShapes) {
  const auto layout = SequenceLayout::with_state({1}, {0}, {3});
  const at::Tensor q = at::randn({1, 2, 12}), cache = at::randn({1, 4, 12});
  EXPECT_THROW(mla_absorbed(q, cache, SequenceLayout::from_lengths({1}), 8, kScale), UsageError);
  EXPECT_THROW(mla_absorbed(q, cache, layout, 13, kScale), UsageError);
  EXPECT_THROW(mla_absorbed(q, cache.narrow(1, 0, 3), layout, 8, kScale), UsageError);
  EXPECT_THROW(mla_absorbed(q, cache, SequenceLayout::with_state({1}, {1}, {3}), 8, kScale), UsageError);
  EXPECT_THROW(mla_absorbed(q, at::randn({1, 4, 11}), layout, 8, kScale), UsageError);
}

}  // namespace
}  // namespace furlong
