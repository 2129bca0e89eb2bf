#include "furlong/ops/norm/norm.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>

#include "furlong/base/error.h"
#include "furlong/base/parallel.h"
#include "furlong/ops/norm/reference.h"
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
  int64_t inputs;  // x; x and weight; x, weight and gate
};

const std::vector<Op>& ops() {
  static const std::vector<Op> all = {
      {"rms_norm", [](const Tensors& t) { return rms_norm(t[0], t[1], 1e-5); },
       [](const Tensors& t) { return rms_norm_reference(t[0], t[1], 1e-5); }, 2},
      {"gated_rms_norm", [](const Tensors& t) { return gated_rms_norm(t[0], t[1], t[2], 1e-5); },
       [](const Tensors& t) { return gated_rms_norm_reference(t[0], t[1], t[2], 1e-5); }, 3},
      {"l2_norm", [](const Tensors& t) { return l2_norm(t[0], 1e-6); },
       [](const Tensors& t) { return l2_norm_reference(t[0], 1e-6); }, 1},
  };
  return all;
}

Tensors make_inputs(const Op& op, int64_t rows, int64_t size, double scale = 1.0) {
  Tensors inputs = {at::randn({rows, size}) * scale, at::randn({size}), at::randn({rows, size})};
  inputs.resize(static_cast<size_t>(op.inputs));
  return inputs;
}

// Sizes around the vector widths (4, 8, 16), rows around the parts of the weight sum (64, 1024).
const std::vector<std::pair<int64_t, int64_t>> kShapes = {{1, 1}, {3, 7}, {5, 16}, {67, 48}, {130, 33}, {1100, 128}};

TEST(Norm, MatchesReference) {
  for (const Op& op : ops()) {
    for (const auto& [rows, size] : kShapes) {
      SCOPED_TRACE(std::string(op.name) + " " + std::to_string(rows) + "x" + std::to_string(size));
      const Tensors inputs = make_inputs(op, rows, size);
      EXPECT_CLOSE(op.op(inputs), op.reference(to_dtype(inputs, at::kDouble)), tolerance::kFp32);
    }
  }
}

TEST(Norm, GradientMatchesReference) {
  for (const Op& op : ops()) {
    for (const auto& [rows, size] : kShapes) {
      if (size == 1) continue;  // x / |x|: the gradient in x is rounding only
      SCOPED_TRACE(std::string(op.name) + " " + std::to_string(rows) + "x" + std::to_string(size));
      const Tensors inputs = make_inputs(op, rows, size);
      const at::Tensor cotangent = at::randn({rows, size});
      const Tensors got = gradients(op.op, inputs, cotangent);
      const Tensors expected = gradients(op.reference, to_dtype(inputs, at::kDouble), cotangent);
      for (size_t i = 0; i < got.size(); ++i) EXPECT_CLOSE(got[i], expected[i], tolerance::kFp32Chain) << "input " << i;
    }
  }
}

TEST(Norm, GradientOfReferenceMatchesFiniteDifferences) {
  for (const Op& op : ops()) {
    const Tensors inputs = to_dtype(make_inputs(op, 3, 5), at::kDouble);
    EXPECT_LE(finite_difference_error(op.op, inputs, at::randn({3, 5}, at::kDouble)), tolerance::kFiniteDifference)
        << op.name;
  }
}

TEST(Norm, Bf16MatchesReference) {
  for (const Op& op : ops()) {
    const Tensors inputs = to_dtype(make_inputs(op, 130, 72), at::kBFloat16);
    const at::Tensor cotangent = at::randn({130, 72}).to(at::kBFloat16);
    EXPECT_CLOSE(op.op(inputs), op.reference(to_dtype(inputs, at::kDouble)), tolerance::kBf16) << op.name;
    const Tensors got = gradients(op.op, inputs, cotangent);
    const Tensors expected = gradients(op.reference, to_dtype(inputs, at::kDouble), cotangent);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].scalar_type(), at::kBFloat16);
      EXPECT_CLOSE(got[i], expected[i], tolerance::kBf16) << op.name << " input " << i;
    }
  }
}

TEST(Norm, MatchesReferenceOnEverySimdTarget) {
  on_every_simd_target([] {
    for (const Op& op : ops()) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        const double bound = dtype == at::kFloat ? tolerance::kFp32Chain : tolerance::kBf16;
        const Tensors inputs = to_dtype(make_inputs(op, 65, 37), dtype);
        const at::Tensor cotangent = at::randn({65, 37}).to(dtype);
        EXPECT_CLOSE(op.op(inputs), op.reference(to_dtype(inputs, at::kDouble)), bound) << op.name;
        const Tensors got = gradients(op.op, inputs, cotangent);
        const Tensors expected = gradients(op.reference, to_dtype(inputs, at::kDouble), cotangent);
        for (size_t i = 0; i < got.size(); ++i) EXPECT_CLOSE(got[i], expected[i], bound) << op.name << " input " << i;
      }
    }
  });
}

TEST(RmsNorm, RoundsBeforeAndAfterTheWeightAsTheReferenceDoes) {
  const at::Tensor x = at::randn({40, 256}).to(at::kBFloat16);
  const at::Tensor weight = at::randn({256});  // an fp32 master: applied as the stored weight will be
  const at::Tensor got = rms_norm(x, weight, 1e-5);
  const at::Tensor expected = rms_norm_reference(x, weight.to(at::kBFloat16), 1e-5);
  // The statistics differ by the order of summation, which turns a rounding of x r now and then.
  EXPECT_LE(got.ne(expected).to(at::kFloat).mean().item<double>(), 0.01);
  EXPECT_CLOSE(got, expected, tolerance::kBf16);
}

TEST(RmsNorm, WeightGradientComesInTheWeightsDtype) {
  const at::Tensor x = at::randn({9, 16}).to(at::kBFloat16);
  at::Tensor weight = at::ones({16}).requires_grad_();
  rms_norm(x, weight, 1e-5).sum().backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
}

TEST(Norm, SmallRowsShowTheEpsilonAndZeroRowsStayZero) {
  for (const Op& op : ops()) {
    Tensors inputs = make_inputs(op, 4, 24, 1e-3);
    inputs[0][2].zero_();
    const at::Tensor y = op.op(inputs);
    EXPECT_CLOSE(y, op.reference(to_dtype(inputs, at::kDouble)), tolerance::kFp32) << op.name;
    EXPECT_EQ(y[2].abs().max().item<float>(), 0.0f) << op.name;
  }
}

TEST(Norm, TakesAnyLayoutAndNumberOfDimensions) {
  for (const Op& op : ops()) {
    Tensors inputs = make_inputs(op, 6, 20);
    const at::Tensor expected = op.op(inputs);
    inputs[0] = inputs[0].t().contiguous().t().view({6, 20});
    if (op.inputs > 2) inputs[2] = inputs[2].t().contiguous().t();
    EXPECT_TRUE(at::equal(op.op(inputs), expected)) << op.name;
    inputs[0] = inputs[0].reshape({2, 3, 20});
    if (op.inputs > 2) inputs[2] = inputs[2].reshape({2, 3, 20});
    EXPECT_TRUE(at::equal(op.op(inputs), expected.view({2, 3, 20}))) << op.name;
  }
}

TEST(Norm, BitsDoNotDependOnTheNumberOfThreads) {
  const int threads = omp_get_max_threads();
  for (const Op& op : ops()) {
    const Tensors inputs = make_inputs(op, 700, 64);
    const at::Tensor cotangent = at::randn({700, 64});
    omp_set_num_threads(1);
    const Tensors one = gradients(op.op, inputs, cotangent);
    omp_set_num_threads(3);
    const Tensors three = gradients(op.op, inputs, cotangent);
    omp_set_num_threads(threads);
    for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], three[i])) << op.name << " input " << i;
  }
}

TEST(Norm, NanInARowStaysInThatRow) {
  for (const Op& op : ops()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      Tensors inputs = to_dtype(make_inputs(op, 3, 20), dtype);
      inputs.back()[1 % inputs.back().size(0)].fill_(std::numeric_limits<double>::quiet_NaN());
      const at::Tensor nan_rows = op.op(inputs).isnan().any(-1);
      if (inputs.back().dim() == 1) continue;  // a weight spoils every row
      EXPECT_TRUE(nan_rows[1].item<bool>()) << op.name;
      EXPECT_FALSE(nan_rows[0].item<bool>() || nan_rows[2].item<bool>()) << op.name;
    }
  }
}

TEST(Norm, HandlesEmptyAndOneToken) {
  for (const Op& op : ops()) {
    const Tensors grads = gradients(op.op, make_inputs(op, 0, 8), at::randn({0, 8}));
    EXPECT_EQ(grads[0].sizes(), at::IntArrayRef({0, 8})) << op.name;
    if (op.inputs > 1) {
      EXPECT_EQ(grads[1].abs().max().item<float>(), 0.0f) << op.name;
    }
    const Tensors one = make_inputs(op, 1, 8);
    EXPECT_CLOSE(op.op(one), op.reference(one), tolerance::kFp32) << op.name;
  }
}

TEST(Norm, MetaKernelsGiveShapesWithoutData) {
  for (const Op& op : ops()) {
    Tensors inputs;
    for (const at::Tensor& input : make_inputs(op, 3, 8)) inputs.push_back(input.to(at::kMeta));
    EXPECT_EQ(op.op(inputs).sizes(), at::IntArrayRef({3, 8})) << op.name;
  }
}

TEST(Norm, RefusesBadShapes) {
  const at::Tensor x = at::randn({3, 8});
  EXPECT_THROW(rms_norm(x, at::ones({7}), 1e-5), UsageError);
  EXPECT_THROW(gated_rms_norm(x, at::ones({7}), x, 1e-5), UsageError);
  EXPECT_THROW(gated_rms_norm(x, at::ones({8}), at::randn({3, 7}), 1e-5), UsageError);
  EXPECT_THROW(l2_norm(at::ones({})), UsageError);
  try {
    rms_norm(x, at::ones({7}), 1e-5);
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "[rms_norm] weight_D: got [7], need [8]");
  }
}

}  // namespace
}  // namespace furlong
