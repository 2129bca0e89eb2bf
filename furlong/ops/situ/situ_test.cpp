#include "furlong/ops/situ/situ.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>

#include "furlong/base/error.h"
#include "furlong/ops/situ/layer.h"
#include "furlong/ops/situ/reference.h"
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

struct Op {
  const char* name;
  Function op;
  Function reference;
};

const std::vector<Op>& ops() {
  static const std::vector<Op> all = {
      {"situ_glu", [](const Tensors& t) { return situ_glu(t[0], t[1], 4.0, 25.0); },
       [](const Tensors& t) { return situ_glu_reference(t[0], t[1], 4.0, 25.0); }},
      {"situ_glu without linear_beta", [](const Tensors& t) { return situ_glu(t[0], t[1], 1.0, std::nullopt); },
       [](const Tensors& t) { return situ_glu_reference(t[0], t[1], 1.0, std::nullopt); }},
      {"swiglu", [](const Tensors& t) { return swiglu(t[0], t[1]); },
       [](const Tensors& t) { return swiglu_reference(t[0], t[1]); }},
  };
  return all;
}

TEST(Glu, MatchesReference) {
  for (const Op& op : ops()) {
    for (const int64_t count : {1, 7, 16, 33, 40000}) {
      for (const double scale : {0.01, 1.0, 30.0}) {
        SCOPED_TRACE(std::string(op.name) + " " + std::to_string(count) + " scale " + std::to_string(scale));
        const Tensors inputs = {at::randn({count}) * scale, at::randn({count}) * scale};
        EXPECT_CLOSE(op.op(inputs), op.reference(to_dtype(inputs, at::kDouble)), tolerance::kFp32);
      }
    }
  }
}

TEST(Glu, IsAccurateElementByElement) {
  // The metric of a whole tensor would hide a tanh that loses its small arguments.
  const at::Tensor small = at::linspace(-0.05, 0.05, 2001, at::kFloat) + 1e-6;
  for (const Op& op : ops()) {
    const at::Tensor got = op.op({small, small}).to(at::kDouble);
    const at::Tensor expected = op.reference(to_dtype({small, small}, at::kDouble));
    EXPECT_LE(((got - expected) / expected).abs().max().item<double>(), tolerance::kFp32) << op.name;
  }
}

TEST(Glu, GradientMatchesReference) {
  for (const Op& op : ops()) {
    const Tensors inputs = {at::randn({37, 29}) * 3, at::randn({37, 29}) * 3};
    const at::Tensor cotangent = at::randn({37, 29});
    const Tensors got = gradients(op.op, inputs, cotangent);
    const Tensors expected = gradients(op.reference, to_dtype(inputs, at::kDouble), cotangent);
    for (size_t i = 0; i < 2; ++i) EXPECT_CLOSE(got[i], expected[i], tolerance::kFp32) << op.name << " input " << i;
  }
}

TEST(Glu, GradientOfReferenceMatchesFiniteDifferences) {
  for (const Op& op : ops()) {
    const Tensors inputs = to_dtype({at::randn({9}) * 2, at::randn({9}) * 2}, at::kDouble);
    EXPECT_LE(finite_difference_error(op.op, inputs, at::randn({9}, at::kDouble)), tolerance::kFiniteDifference)
        << op.name;
  }
}

TEST(Glu, Bf16MatchesReference) {
  for (const Op& op : ops()) {
    const Tensors inputs = to_dtype({at::randn({37, 29}) * 3, at::randn({37, 29}) * 3}, at::kBFloat16);
    const at::Tensor cotangent = at::randn({37, 29}).to(at::kBFloat16);
    EXPECT_CLOSE(op.op(inputs), op.reference(to_dtype(inputs, at::kDouble)), tolerance::kBf16) << op.name;
    const Tensors got = gradients(op.op, inputs, cotangent);
    const Tensors expected = gradients(op.reference, to_dtype(inputs, at::kDouble), cotangent);
    for (size_t i = 0; i < 2; ++i) EXPECT_CLOSE(got[i], expected[i], tolerance::kBf16) << op.name << " input " << i;
  }
}

TEST(Glu, MatchesReferenceOnEverySimdTarget) {
  on_every_simd_target([] {
    for (const Op& op : ops()) {
      const Tensors inputs = {at::randn({5, 37}) * 3, at::randn({5, 37}) * 3};
      const at::Tensor cotangent = at::randn({5, 37});
      EXPECT_CLOSE(op.op(inputs), op.reference(to_dtype(inputs, at::kDouble)), tolerance::kFp32) << op.name;
      const Tensors got = gradients(op.op, inputs, cotangent);
      const Tensors expected = gradients(op.reference, to_dtype(inputs, at::kDouble), cotangent);
      for (size_t i = 0; i < 2; ++i) EXPECT_CLOSE(got[i], expected[i], tolerance::kFp32) << op.name << " input " << i;
    }
  });
}

TEST(SituGlu, StaysBoundedAndFiniteForHugeInputs) {
  const at::Tensor huge = at::full({20}, 1e30);
  const at::Tensor y = situ_glu(huge, huge, 4.0, 25.0);
  EXPECT_CLOSE(y, at::full({20}, 100.0), tolerance::kFp32);
  EXPECT_EQ(situ_glu(-huge, huge, 4.0, 25.0).abs().max().item<float>() < 1e-30f, true);
  const Tensors grads =
      gradients([](const Tensors& t) { return situ_glu(t[0], t[1], 4.0, 25.0); }, {huge, -huge}, at::full({20}, 1.0));
  EXPECT_TRUE(grads[0].isfinite().all().item<bool>() && grads[1].isfinite().all().item<bool>());
}

TEST(Glu, KeepsNan) {
  const at::Tensor nan = at::full({20}, std::numeric_limits<float>::quiet_NaN());
  for (const Op& op : ops()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor one = at::full({20}, 1.0, dtype);
      EXPECT_TRUE(op.op({nan.to(dtype), one}).isnan().all().item<bool>()) << op.name;
      EXPECT_TRUE(op.op({one, nan.to(dtype)}).isnan().all().item<bool>()) << op.name;
    }
  }
}

TEST(Glu, HandlesEmptyAndStridedInputs) {
  for (const Op& op : ops()) {
    EXPECT_EQ(gradients(op.op, {at::randn({0, 4}), at::randn({0, 4})}, at::randn({0, 4}))[0].numel(), 0) << op.name;
    const at::Tensor wide = at::randn({6, 10});
    const Tensors halves = {wide.slice(1, 0, 5), wide.slice(1, 5, 10)};
    EXPECT_TRUE(at::equal(op.op(halves), op.op({halves[0].contiguous(), halves[1].contiguous()}))) << op.name;
  }
}

TEST(Glu, RefusesBadArguments) {
  const at::Tensor x = at::randn({3, 4});
  EXPECT_THROW(swiglu(x, at::randn({3, 5})), UsageError);
  EXPECT_THROW(swiglu(x, x.to(at::kBFloat16)), UsageError);
  EXPECT_THROW(situ_glu(x, x, 0.0, 25.0), UsageError);
  EXPECT_THROW(situ_glu(x, x, 4.0, -1.0), UsageError);
}

TEST(GluMlp, IsDownOfActivatedGateAndUp) {
  GluMlp mlp({.hidden_size = 6, .intermediate_size = 10, .activation = {.kind = Activation::Kind::kSwiglu}});
  ParamList list;
  mlp.declare(list, "mlp.");
  ASSERT_EQ(list.params().size(), 3u);
  EXPECT_EQ(list.params()[2].spec.name, "mlp.down_proj.weight");
  for (const Param& param : list.params()) {
    EXPECT_EQ(param.spec.rule, OptimizerRule::kMuon);
    *param.tensor = at::randn(param.spec.shape);
  }
  const auto weight = [&](int i) { return list.params()[i].tensor->t(); };
  const at::Tensor x = at::randn({5, 6});
  const at::Tensor expected = swiglu_reference(x.matmul(weight(0)), x.matmul(weight(1))).matmul(weight(2));
  EXPECT_CLOSE(mlp.forward(x, {}), expected, tolerance::kFp32);
  ForwardContext exact;
  exact.numerics = Numerics::kExact;
  EXPECT_CLOSE(mlp.forward(x, exact), expected, tolerance::kFp32);
}

}  // namespace
}  // namespace furlong
