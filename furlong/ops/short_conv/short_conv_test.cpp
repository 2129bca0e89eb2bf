#include "furlong/ops/short_conv/short_conv.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <limits>

#include "furlong/base/error.h"
#include "furlong/ops/common/kernel.h"
#include "tests/support/gradient.h"
#include "tests/support/poisoned_memory.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

void expect_close(const char* what, const at::Tensor& got, const at::Tensor& expected, double tolerance) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  if (expected.numel() == 0) return;
  const at::Tensor wide = expected.to(at::kDouble);
  EXPECT_LE((got.to(at::kDouble) - wide).abs().max().item<double>(), tolerance * wide.abs().max().item<double>())
      << what;
}

struct Inputs {
  at::Tensor x, weight, tail;
  SequenceLayout layout;

  Inputs(const std::vector<int64_t>& lengths, int64_t channels, int64_t width, int64_t extra_rows = 0)
      : layout(SequenceLayout::from_lengths(lengths)) {
    x = at::randn({layout.num_tokens() + extra_rows, channels});
    weight = at::randn({channels, width});
    tail = at::randn({layout.num_sequences(), width - 1, channels});
  }
  std::vector<at::Tensor*> tensors() { return {&x, &weight, &tail}; }
  Inputs to(at::ScalarType dtype) const {
    Inputs copy = *this;
    for (at::Tensor* t : copy.tensors()) *t = t->to(dtype);
    return copy;
  }
};

using Result = std::tuple<at::Tensor, at::Tensor>;

Result kernel(const Inputs& in) {
  return short_conv(in.x, in.weight, in.layout, in.tail);
}

Result reference(const Inputs& in) {
  using Signature = Result(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const std::optional<at::Tensor>&);
  static const auto op = find_op<Signature>("furlong::short_conv_reference");
  return op.call(in.x, in.weight, in.layout.offsets(), in.layout.offsets_host(), in.tail);
}

/// Gradients at x, weight and tail.
std::vector<at::Tensor> gradients(Result (*form)(const Inputs&), Inputs in, const at::Tensor& d_y,
                                  const at::Tensor& d_tail) {
  for (at::Tensor* t : in.tensors()) *t = t->detach().clone().requires_grad_();
  const auto [y, tail] = form(in);
  const at::ScalarType sum_type = in.weight.scalar_type();
  ((y.to(sum_type) * d_y).slice(0, 0, in.layout.num_tokens()).sum() + (tail.to(sum_type) * d_tail).sum()).backward();
  std::vector<at::Tensor> result;
  for (at::Tensor* t : in.tensors()) result.push_back(t->grad());
  return result;
}

void compare_with_reference(const Inputs& in) {
  const Inputs exact = in.to(at::kDouble);
  const auto [y, tail] = kernel(in);
  const auto [expected_y, expected_tail] = reference(exact);
  expect_close("y", y, expected_y, tolerance::kFp32);
  EXPECT_TRUE(tail.to(at::kDouble).equal(expected_tail));
  const at::Tensor d_y = at::randn(in.x.sizes()), d_tail = at::randn(in.tail.sizes());
  const auto got = gradients(kernel, in, d_y, d_tail);
  const auto expected = gradients(reference, exact, d_y.to(at::kDouble), d_tail.to(at::kDouble));
  const char* names[] = {"d_x", "d_weight", "d_tail"};
  for (size_t i = 0; i < got.size(); ++i) expect_close(names[i], got[i], expected[i], tolerance::kFp32Chain);
}

TEST(ShortConv, MatchesReferenceWithGradients) {
  for (const int64_t width : {1, 2, 4, 5}) {
    for (const int64_t channels : {1, 16, 70, 192}) {
      SCOPED_TRACE(::testing::Message() << width << ' ' << channels);
      compare_with_reference(Inputs({7, 1, 0, 2, 150}, channels, width));
    }
  }
}

TEST(ShortConv, MatchesReferenceAtEveryLength) {
  std::vector<int64_t> lengths{255, 256, 257, 1000, 4096};
  for (int64_t tokens = 1; tokens <= 130; ++tokens) {
    lengths.push_back(tokens);
    compare_with_reference(Inputs({tokens}, 20, 4));
  }
  compare_with_reference(Inputs(lengths, 20, 4));
  compare_with_reference(Inputs({65536}, 20, 4));
}

TEST(ShortConv, GradientOfReferenceMatchesFiniteDifferences) {
  const Inputs in = Inputs({4, 0, 1, 3}, 3, 4).to(at::kDouble);
  const at::Tensor d_y = at::randn(in.x.sizes(), at::kDouble), d_tail = at::randn(in.tail.sizes(), at::kDouble);
  const auto weighted = [&](const testing::Tensors& x) {
    Inputs point = in;
    point.x = x[0], point.weight = x[1], point.tail = x[2];
    const auto [y, tail] = reference(point);
    return (y * d_y).sum() + (tail * d_tail).sum();
  };
  EXPECT_LE(testing::finite_difference_error(weighted, {in.x, in.weight, in.tail}, at::ones({}, at::kDouble)),
            tolerance::kFiniteDifference);
}

TEST(ShortConv, HandlesEmptyAndOneToken) {
  compare_with_reference(Inputs({1}, 16, 4));
  compare_with_reference(Inputs({0, 0}, 16, 4));
  compare_with_reference(Inputs({}, 16, 4));
}

TEST(ShortConv, MissingTailIsZero) {
  Inputs in({5, 2}, 16, 4);
  in.tail.zero_();
  EXPECT_TRUE(std::get<0>(short_conv(in.x, in.weight, in.layout, {})).equal(std::get<0>(kernel(in))));
}

TEST(ShortConv, SplitEqualsWhole) {
  const Inputs in({20}, 16, 4);
  const auto [y, tail] = kernel(in);
  for (const int64_t cut : {1, 2, 3, 10, 19}) {
    const auto [first, middle] =
        short_conv(in.x.slice(0, 0, cut), in.weight, SequenceLayout::from_lengths({cut}), in.tail);
    const auto [second, last] =
        short_conv(in.x.slice(0, cut), in.weight, SequenceLayout::from_lengths({20 - cut}), middle);
    EXPECT_TRUE(at::cat({first, second}).equal(y));
    EXPECT_TRUE(last.equal(tail));
  }
}

TEST(ShortConv, StepEqualsWhole) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Inputs in({6, 6}, 40, 4);
    in.x = in.x.to(dtype);
    in.tail = in.tail.to(dtype);
    const auto [y, tail] = kernel(in);
    // The layer's pool holds q, k and v side by side: tails are views of wider rows.
    at::Tensor wide = at::zeros({5, 3, 120}, in.x.options());
    at::Tensor pool = wide.narrow(2, 40, 40);
    const at::Tensor slots = at::tensor(std::vector<int64_t>{3, 1});
    pool.index_copy_(0, slots, in.tail);
    for (int64_t t = 0; t < 6; ++t) {
      const at::Tensor got =
          short_conv_step_(at::cat({in.x.slice(0, t, t + 1), in.x.slice(0, 6 + t, 7 + t)}), in.weight, pool, slots);
      EXPECT_TRUE(got.equal(at::cat({y.slice(0, t, t + 1), y.slice(0, 6 + t, 7 + t)})));
    }
    EXPECT_TRUE(pool.index_select(0, slots).equal(tail));
    EXPECT_EQ(wide.narrow(2, 0, 40).abs().max().item<float>(), 0.0f);
  }
}

TEST(ShortConv, NeverReadsRowsPastTheLastSequence) {
  Inputs in({5, 4}, 24, 4, /*extra_rows=*/3), whole = in;
  whole.x = in.x.slice(0, 0, 9).clone();
  in.x.slice(0, 9).fill_(std::numeric_limits<float>::quiet_NaN());
  const at::Tensor y = std::get<0>(kernel(in));
  EXPECT_TRUE(y.slice(0, 0, 9).equal(std::get<0>(kernel(whole))));
  EXPECT_EQ(y.slice(0, 9).abs().max().item<float>(), 0.0f);
  const auto grad = gradients(kernel, in, at::randn(in.x.sizes()), at::randn(in.tail.sizes()));
  EXPECT_EQ(grad[0].slice(0, 9).abs().max().item<float>(), 0.0f);
  EXPECT_TRUE(grad[1].isfinite().all().item<bool>());
}

TEST(ShortConv, TakesBf16) {
  Inputs in({33, 2}, 48, 4);
  in.x = in.x.to(at::kBFloat16);
  in.tail = in.tail.to(at::kBFloat16);
  const Inputs exact = in.to(at::kFloat);
  expect_close("y", std::get<0>(kernel(in)), std::get<0>(reference(exact)), tolerance::kBf16);
  const at::Tensor d_y = at::randn(in.x.sizes()).to(at::kBFloat16).to(at::kFloat);
  const at::Tensor d_tail = at::randn(in.tail.sizes()).to(at::kBFloat16).to(at::kFloat);
  const auto got = gradients(kernel, in, d_y, d_tail), expected = gradients(reference, exact, d_y, d_tail);
  for (size_t i = 0; i < got.size(); ++i) expect_close("gradient", got[i], expected[i], tolerance::kBf16);
}

TEST(ShortConv, DoesNotDependOnThreads) {
  const Inputs in({300, 5}, 130, 4);
  const at::Tensor d_y = at::randn(in.x.sizes()), d_tail = at::randn(in.tail.sizes());
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  const auto one = gradients(kernel, in, d_y, d_tail);
  const at::Tensor y = std::get<0>(kernel(in));
  omp_set_num_threads(3);
  const auto three = gradients(kernel, in, d_y, d_tail);
  EXPECT_TRUE(y.equal(std::get<0>(kernel(in))));
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(one[i].equal(three[i]));
  omp_set_num_threads(before);
}

/// Output, final tail and every gradient.
std::vector<at::Tensor> results(const Inputs& in, const at::Tensor& d_y, const at::Tensor& d_tail) {
  const auto [y, tail] = kernel(in);
  std::vector<at::Tensor> all = gradients(kernel, in, d_y, d_tail);
  all.insert(all.begin(), {y.detach(), tail.detach()});
  return all;
}

void expect_same_bits(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(got[i].equal(expected[i])) << i;
}

TEST(ShortConv, RepeatsGiveTheSameBitsAndFreshMemoryIsNeverRead) {
  for (const int64_t channels : {130, 16}) {
    const Inputs in({300, 1, 0, 5}, channels, 4);
    const at::Tensor d_y = at::randn(in.x.sizes()), d_tail = at::randn(in.tail.sizes());
    const auto first = results(in, d_y, d_tail);
    for (int i = 0; i < 50; ++i) expect_same_bits(results(in, d_y, d_tail), first);
    const testing::PoisonedMemory poisoned;
    expect_same_bits(results(in, d_y, d_tail), first);
  }
}

TEST(ShortConv, NeighboursChangeNoBits) {
  const std::vector<int64_t> lengths{1, 40, 0, 150, 2};
  const Inputs pack(lengths, 70, 4);
  const at::Tensor d_y = at::randn(pack.x.sizes()), d_tail = at::randn(pack.tail.sizes());
  const auto together = results(pack, d_y, d_tail);
  int64_t first = 0;
  for (int64_t b = 0; b < static_cast<int64_t>(lengths.size()); ++b) {
    const int64_t last = first + lengths[b];
    Inputs alone = pack;
    alone.layout = SequenceLayout::from_lengths({lengths[b]});
    alone.x = pack.x.slice(0, first, last);
    alone.tail = pack.tail.slice(0, b, b + 1);
    const auto got = results(alone, d_y.slice(0, first, last), d_tail.slice(0, b, b + 1));
    expect_same_bits({got[0], got[1], got[2], got[4]},
                     {together[0].slice(0, first, last), together[1].slice(0, b, b + 1),
                      together[2].slice(0, first, last), together[4].slice(0, b, b + 1)});
    first = last;
  }
}

TEST(ShortConv, RefusesBadArguments) {
  const Inputs in({4}, 16, 4);
  EXPECT_THROW(short_conv(in.x, in.weight.slice(0, 0, 8), in.layout, {}), UsageError);
  EXPECT_THROW(short_conv(in.x, in.weight, SequenceLayout::from_lengths({5}), {}), UsageError);
  EXPECT_THROW(short_conv(in.x, in.weight, in.layout, in.tail.slice(1, 0, 2)), UsageError);
  at::Tensor pool = at::zeros({1, 3, 16});
  const at::Tensor x = in.x.slice(0, 0, 1), weight = in.weight.clone().requires_grad_();
  EXPECT_THROW(short_conv_step_(x, in.weight, pool, at::full({1}, 1, at::kLong)), UsageError);
  EXPECT_THROW(short_conv_step_(x, weight, pool, at::zeros({1}, at::kLong)), UsageError);
  const at::NoGradGuard no_grad;
  EXPECT_NO_THROW(short_conv_step_(x, weight, pool, at::zeros({1}, at::kLong)));
}

TEST(ShortConvSchemas, HaveAllTheirKeys) {
  for (const char* name : {"furlong::short_conv", "furlong::short_conv_step_"}) {
    const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
    ASSERT_TRUE(op.has_value()) << name;
    for (const auto key :
         {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::Meta, c10::DispatchKey::Autograd}) {
      EXPECT_TRUE(op->hasKernelForDispatchKey(key)) << name << ' ' << toString(key);
    }
  }
}

}  // namespace
}  // namespace furlong
