#include "furlong/ops/moe/experts/experts.h"

#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "furlong/base/error.h"
#include "furlong/base/parallel.h"
#include "furlong/ops/common/kernel.h"
#include "tests/support/gradient.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using testing::Tensors;

const Activation kSitu{Activation::Kind::kSitu, 4.0, 25.0};
const Activation kSwiglu{};

at::Tensor reference(const Tensors& t, const at::Tensor& ids, const Activation& activation) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&, c10::string_view, double, std::optional<double>);
  return find_op<Signature>("furlong::moe_experts_reference")
      .call(t[0], ids, t[1], t[2], t[3], t[4], activation.kind == Activation::Kind::kSitu ? "situ" : "swiglu",
            activation.beta, activation.linear_beta);
}

at::Tensor run(const Tensors& t, const at::Tensor& ids, const Activation& activation) {
  return moe_experts(t[0], ids, t[1], t[2], t[3], t[4], activation);
}

struct Inputs {
  Tensors tensors;  // z, weights, w1, w3, w2
  at::Tensor ids_NA;
};

/// Experts at and above `used` get no token.
Inputs make_inputs(int64_t tokens, int64_t chosen, int64_t experts, int64_t used, int64_t width, int64_t expert_size) {
  return {{at::randn({tokens, width}), at::rand({tokens, chosen}), at::randn({experts, expert_size, width}) * 0.3,
           at::randn({experts, expert_size, width}) * 0.3, at::randn({experts, width, expert_size}) * 0.3},
          at::randint(used, {tokens, chosen}, at::kLong)};
}

TEST(MoeExperts, MatchesReference) {
  for (const Activation& activation : {kSitu, kSwiglu}) {
    for (const int64_t tokens : {1, 7, 600}) {
      const Inputs in = make_inputs(tokens, 3, 8, tokens == 600 ? 2 : 7, 20, 13);
      EXPECT_CLOSE(run(in.tensors, in.ids_NA, activation),
                   reference(testing::to_dtype(in.tensors, at::kDouble), in.ids_NA, activation), tolerance::kFp32);
    }
  }
}

TEST(MoeExperts, GradientMatchesReference) {
  for (const Activation& activation : {kSitu, kSwiglu}) {
    const Inputs in = make_inputs(50, 3, 8, 7, 20, 13);
    const at::Tensor cotangent = at::randn({50, 20});
    const Tensors got =
        testing::gradients([&](const Tensors& t) { return run(t, in.ids_NA, activation); }, in.tensors, cotangent);
    const Tensors expected = testing::gradients([&](const Tensors& t) { return reference(t, in.ids_NA, activation); },
                                                testing::to_dtype(in.tensors, at::kDouble), cotangent);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_CLOSE(got[i], expected[i], tolerance::kFp32Chain);
  }
}

TEST(MoeExperts, ReferenceGradientMatchesFiniteDifferences) {
  const Inputs in = make_inputs(4, 2, 3, 3, 3, 2);
  const auto op = [&](const Tensors& t) { return reference(t, in.ids_NA, kSitu); };
  EXPECT_LE(
      testing::finite_difference_error(op, testing::to_dtype(in.tensors, at::kDouble), at::randn({4, 3}, at::kDouble)),
      1e-7);
}

TEST(MoeExperts, ExpertsWithoutTokensGetZeroGradients) {
  const Inputs in = make_inputs(20, 2, 6, 4, 8, 5);
  const Tensors got =
      testing::gradients([&](const Tensors& t) { return run(t, in.ids_NA, kSitu); }, in.tensors, at::randn({20, 8}));
  for (const size_t which : {2, 3, 4}) {
    EXPECT_EQ(got[which].narrow(0, 4, 2).abs().max().item<float>(), 0.0f);
    EXPECT_GT(got[which].narrow(0, 0, 4).abs().max().item<float>(), 0.0f);
  }
}

TEST(MoeExperts, MasterWeightsKeepTheirDtypeUnderBfloat16) {
  const Inputs in = make_inputs(64, 2, 4, 4, 32, 16);
  Tensors mixed = in.tensors;
  mixed[0] = mixed[0].to(at::kBFloat16);
  const auto op = [&](const Tensors& t) { return run(t, in.ids_NA, kSitu); };
  const at::Tensor cotangent = at::randn({64, 32}).to(at::kBFloat16);
  Tensors rounded = mixed;
  for (at::Tensor& x : rounded) x = x.to(at::kDouble);
  const at::Tensor expected = reference(rounded, in.ids_NA, kSitu);
  EXPECT_CLOSE(op(mixed), expected, 2 * tolerance::kBf16);  // four roundings on the way
  const Tensors got = testing::gradients(op, mixed, cotangent);
  const Tensors exact = testing::gradients([&](const Tensors& t) { return reference(t, in.ids_NA, kSitu); }, rounded,
                                           cotangent.to(at::kDouble));
  EXPECT_EQ(got[0].scalar_type(), at::kBFloat16);
  for (size_t i = 0; i < got.size(); ++i) {
    if (i > 0) EXPECT_EQ(got[i].scalar_type(), at::kFloat);
    EXPECT_CLOSE(got[i], exact[i], 4 * tolerance::kBf16);
  }
}

TEST(MoeExperts, IsDeterministicAndIndependentOfTheThreadCount) {
  const Inputs in = make_inputs(700, 2, 4, 4, 32, 16);
  const auto everything = [&] {
    const auto op = [&](const Tensors& t) { return run(t, in.ids_NA, kSitu); };
    Tensors all = testing::gradients(op, in.tensors, in.tensors[0]);
    all.push_back(op(in.tensors));
    return all;
  };
  const Tensors first = everything(), second = everything();
  const int threads = num_threads();
  omp_set_num_threads(1);
  const Tensors serial = everything();
  omp_set_num_threads(threads);
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(first[i].equal(second[i]));
    EXPECT_TRUE(first[i].equal(serial[i]));
  }
}

TEST(MoeExperts, HandlesNoTokens) {
  const Inputs in = make_inputs(0, 2, 4, 4, 8, 5);
  EXPECT_EQ(run(in.tensors, in.ids_NA, kSitu).sizes(), (std::vector<int64_t>{0, 8}));
}

TEST(MoeExperts, RefusesBadShapes) {
  const Inputs in = make_inputs(6, 2, 4, 4, 8, 5);
  Tensors bad = in.tensors;
  bad[4] = bad[2];
  EXPECT_THROW(run(bad, in.ids_NA, kSitu), UsageError);
  EXPECT_THROW(run(in.tensors, in.ids_NA + 4, kSitu), UsageError);
  EXPECT_THROW(run(in.tensors, in.ids_NA.narrow(0, 0, 5), kSitu), UsageError);
  bad = in.tensors;
  bad[1] = bad[1].to(at::kBFloat16);
  EXPECT_THROW(run(bad, in.ids_NA, kSitu), UsageError);
}

}  // namespace
}  // namespace furlong
