#include "furlong/ops/attnres/attnres.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "furlong/base/error.h"
#include "furlong/base/parallel.h"
#include "furlong/ops/attnres/layer.h"
#include "furlong/ops/attnres/reference.h"
#include "tests/support/gradient.h"
#include "tests/support/simd_targets.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using testing::finite_difference_error;
using testing::gradients;
using testing::on_every_simd_target;
using testing::Tensors;
using testing::to_dtype;

/// Inputs are the sources, then w.
at::Tensor read(const Tensors& t) {
  return std::get<0>(attnres_read(at::TensorList(t.data(), t.size() - 1), t.back(), 1e-5));
}

at::Tensor read_reference(const Tensors& t) {
  return std::get<0>(attnres_read_reference(at::TensorList(t.data(), t.size() - 1), t.back(), 1e-5));
}

Tensors make_inputs(int64_t sources, int64_t tokens, int64_t size) {
  Tensors inputs;
  for (int64_t s = 0; s < sources; ++s) inputs.push_back(at::randn({tokens, size}) * (s + 1));
  inputs.push_back(at::randn({size}) * 0.3);
  return inputs;
}

TEST(AttnResRead, MatchesReference) {
  for (const int64_t sources : {1, 2, 3, 9, 17}) {
    for (const int64_t size : {1, 7, 16, 40}) {
      SCOPED_TRACE(std::string("S") + std::to_string(sources) + "_D" + std::to_string(size));
      const Tensors inputs = make_inputs(sources, 70, size);
      EXPECT_CLOSE(read(inputs), read_reference(to_dtype(inputs, at::kDouble)), tolerance::kFp32);
    }
  }
}

TEST(AttnResRead, ReturnsTheWeightsOfTheSources) {
  const Tensors inputs = make_inputs(4, 30, 24);
  const at::TensorList sources(inputs.data(), 4);
  const auto [out, p] = attnres_read(sources, inputs[4], 1e-5);
  EXPECT_CLOSE(p, std::get<1>(attnres_read_reference(sources, inputs[4], 1e-5)), tolerance::kFp32);
  EXPECT_CLOSE(p.sum(1), at::ones({30}), tolerance::kFp32);
  EXPECT_FALSE(p.requires_grad());
}

TEST(AttnResRead, GradientMatchesReference) {
  for (const int64_t sources : {1, 2, 9}) {
    const Tensors inputs = make_inputs(sources, 150, 40);
    const at::Tensor cotangent = at::randn({150, 40});
    const Tensors got = gradients(read, inputs, cotangent);
    const Tensors expected = gradients(read_reference, to_dtype(inputs, at::kDouble), cotangent);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_CLOSE(got[i], expected[i], tolerance::kFp32Chain) << sources << " sources, input " << i;
    }
  }
}

TEST(AttnResRead, GradientOfReferenceMatchesFiniteDifferences) {
  const Tensors inputs = to_dtype(make_inputs(3, 2, 5), at::kDouble);
  EXPECT_LE(finite_difference_error(read, inputs, at::randn({2, 5}, at::kDouble)), tolerance::kFiniteDifference);
}

TEST(AttnResRead, Bf16MatchesReference) {
  Tensors inputs = make_inputs(9, 70, 40);
  for (size_t s = 0; s + 1 < inputs.size(); ++s) inputs[s] = inputs[s].to(at::kBFloat16);
  const at::Tensor cotangent = at::randn({70, 40}).to(at::kBFloat16);
  EXPECT_CLOSE(read(inputs), read_reference(to_dtype(inputs, at::kDouble)), tolerance::kBf16);
  const Tensors got = gradients(read, inputs, cotangent);
  const Tensors expected = gradients(read_reference, to_dtype(inputs, at::kDouble), cotangent);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_CLOSE(got[i], expected[i], tolerance::kBf16) << "input " << i;
  EXPECT_EQ(got.back().scalar_type(), at::kFloat);
}

TEST(AttnResRead, MatchesReferenceOnEverySimdTarget) {
  const Tensors inputs = make_inputs(3, 20, 37);
  const at::Tensor cotangent = at::randn({20, 37});
  const at::Tensor expected = read_reference(to_dtype(inputs, at::kDouble));
  const Tensors expected_grads = gradients(read_reference, to_dtype(inputs, at::kDouble), cotangent);
  on_every_simd_target([&] {
    EXPECT_CLOSE(read(inputs), expected, tolerance::kFp32);
    const Tensors grads = gradients(read, inputs, cotangent);
    for (size_t i = 0; i < grads.size(); ++i) EXPECT_CLOSE(grads[i], expected_grads[i], tolerance::kFp32Chain);
  });
}

TEST(AttnResRead, OneSourceIsTheIdentityAlsoForGradients) {
  const Tensors inputs = make_inputs(1, 5, 24);
  const at::Tensor cotangent = at::randn({5, 24});
  EXPECT_TRUE(at::equal(read(inputs), inputs[0]));
  const Tensors grads = gradients(read, inputs, cotangent);
  EXPECT_TRUE(at::equal(grads[0], cotangent));
  EXPECT_EQ(grads[1].abs().max().item<float>(), 0.0f);
}

TEST(AttnResRead, BitsDoNotDependOnTheNumberOfThreads) {
  const int threads = omp_get_max_threads();
  const Tensors inputs = make_inputs(4, 500, 32);
  const at::Tensor cotangent = at::randn({500, 32});
  omp_set_num_threads(1);
  const Tensors one = gradients(read, inputs, cotangent);
  omp_set_num_threads(3);
  const Tensors three = gradients(read, inputs, cotangent);
  omp_set_num_threads(threads);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], three[i])) << "input " << i;
}

TEST(AttnResRead, HandlesEmptyAndOneToken) {
  const Tensors grads = gradients(read, make_inputs(2, 0, 8), at::randn({0, 8}));
  EXPECT_EQ(grads[0].sizes(), at::IntArrayRef({0, 8}));
  EXPECT_EQ(grads[2].abs().max().item<float>(), 0.0f);
  const Tensors one = make_inputs(3, 1, 8);
  EXPECT_CLOSE(read(one), read_reference(one), tolerance::kFp32);
}

TEST(AttnResRead, RefusesBadShapes) {
  const at::Tensor v = at::randn({3, 8});
  EXPECT_THROW(attnres_read({}, at::ones({8}), 1e-5), UsageError);
  EXPECT_THROW(attnres_read({v, at::randn({3, 7})}, at::ones({8}), 1e-5), UsageError);
  EXPECT_THROW(attnres_read({v, v.to(at::kBFloat16)}, at::ones({8}), 1e-5), UsageError);
  EXPECT_THROW(attnres_read({v}, at::ones({7}), 1e-5), UsageError);
}

TEST(ResidualStream, ReadsTheEmbeddingThenTheMeanOfItsSources) {
  AttnResRead attn_res(8, 1e-5);
  ParamList list;
  attn_res.declare(list, "model.layers.0.mlp_res");
  ASSERT_EQ(list.params()[0].spec.name, "model.layers.0.mlp_res_norm.weight");
  ASSERT_EQ(list.params()[1].spec.name, "model.layers.0.mlp_res_proj.weight");
  for (const Param& param : list.params()) {
    EXPECT_FALSE(param.spec.weight_decay);
    *param.tensor = at::ones(param.spec.shape) * param.spec.init.a;
  }
  const at::Tensor embedding = at::randn({5, 8});
  ResidualStream stream(embedding, /*block_size=*/2);
  at::Tensor weights;
  EXPECT_TRUE(stream.read(attn_res, &weights).is_same(embedding));
  EXPECT_TRUE(at::equal(weights, at::ones({1})));
  const at::Tensor a = at::randn({5, 8});
  const at::Tensor b = at::randn({5, 8});
  stream.seal_before(0);
  EXPECT_FALSE(stream.prefix().defined());
  stream.add(a);
  stream.seal_before(1);
  stream.add(b);
  EXPECT_EQ(stream.blocks().size(), 1u);
  EXPECT_CLOSE(stream.read(attn_res, &weights), (embedding + a + b) / 2, tolerance::kFp32);
  EXPECT_CLOSE(weights, at::ones({2}) / 2, tolerance::kFp32);
  stream.seal_before(2);
  ASSERT_EQ(stream.blocks().size(), 2u);
  EXPECT_TRUE(stream.blocks()[0].is_same(embedding));
  EXPECT_TRUE(at::equal(stream.blocks()[1], a + b));
}

}  // namespace
}  // namespace furlong
