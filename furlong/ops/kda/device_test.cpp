// The ops on CUDA tensors against the recurrence in fp64: what the glue between tensors and kernels may get wrong.
// Skipped without a GPU; the kernels' own tests need no torch (cuda/forward_test.cu and its neighbours).

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "furlong/ops/kda/kda.h"
#include "tests/support/kda_inputs.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using namespace testing;

class KdaOnCuda : public ::testing::Test {
  void SetUp() override {
    if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  }
};

const std::vector<int64_t> kLengths = {130, 1, 0, 70};

Inputs on_device(const Inputs& in) {
  Inputs there = in;
  for (at::Tensor* x : there.tensors()) *x = x->to(at::kCUDA);
  there.layout = SequenceLayout::from_lengths(kLengths, at::kCUDA);
  return there;
}

/// Relative root mean square.
void expect_near(const char* what, const at::Tensor& got, const at::Tensor& expected, double limit) {
  const at::Tensor wide = expected.to(at::kDouble);
  EXPECT_LE((got.cpu().to(at::kDouble) - wide).norm().item<double>(), limit * wide.norm().item<double>()) << what;
}

/// bf16 products round their operands: tolerance::kBf16 for every result, whatever its type.
double limit_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? tolerance::kKda : tolerance::kBf16;
}

TEST_F(KdaOnCuda, MatchesReferenceWithGradients) {
  for (const auto& [K, V] : {std::pair<int64_t, int64_t>{128, 128}, {64, 64}, {60, 100}}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(::testing::Message() << K << " x " << V << ' ' << toString(dtype));
      const Inputs wide(kLengths, 2, K, V);
      const Inputs in = dtype == at::kFloat ? wide : wide.narrow();
      const at::Tensor d_out = at::randn(in.v.sizes()).to(dtype), d_state = at::randn(in.state.sizes());
      const KdaOutput expected = run(kda_reference, in.to(at::kDouble)), got = run(kda_chunk, on_device(in));
      expect_near("out", got.out_NHV, expected.out_NHV, limit_of(dtype));
      expect_near("final_state", got.final_state_BHKV, expected.final_state_BHKV, limit_of(dtype));
      const auto exact = gradients(kda_reference, in.to(at::kDouble), d_out.to(at::kDouble), d_state.to(at::kDouble));
      const auto grad = gradients(kda_chunk, on_device(in), d_out.to(at::kCUDA), d_state.to(at::kCUDA));
      // The gate's gradient sums over the rows of a chunk: cuda/backward_test.cu allows it half as much again.
      for (size_t i = 0; i < grad.size(); ++i) {
        expect_near(kGradientNames[i], grad[i], exact[i], limit_of(dtype) * (i == 3 && dtype != at::kFloat ? 1.5 : 1));
      }
    }
  }
}

TEST_F(KdaOnCuda, StepsEqualTheChunk) {
  const at::NoGradGuard no_grad;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Inputs wide({1, 1, 1}, 2, 128, 128);
    const Inputs in = dtype == at::kFloat ? wide : wide.narrow();
    const at::Tensor slots = at::tensor(std::vector<int64_t>{4, 0, 2});
    const at::Tensor before = at::randn({5, 2, 128, 128});
    Inputs from_pool = in;
    from_pool.state = before.index_select(0, slots);
    const KdaOutput expected = run(kda_reference, from_pool.to(at::kDouble));
    at::Tensor pool = before.to(at::kCUDA);
    const auto there = [](const at::Tensor& x) { return x.to(at::kCUDA); };
    const at::Tensor out = kda_step_(there(in.q), there(in.k), there(in.v), there(in.decay_log), there(in.beta), pool,
                                     there(slots), in.scale());
    expect_near("out", out, expected.out_NHV, limit_of(dtype));
    expect_near("state", pool.cpu().index_select(0, slots), expected.final_state_BHKV, tolerance::kKda);
    EXPECT_TRUE(pool[1].cpu().equal(before[1]) && pool[3].cpu().equal(before[3]));
  }
}

TEST_F(KdaOnCuda, MapsSegments) {
  const Inputs in(kLengths, 2, 64, 48);
  const Inputs there = on_device(in);
  const KdaSegmentMap map = kda_segment_map(there.k, there.v, there.decay_log, there.beta, there.layout);
  const at::Tensor state = at::matmul(map.matrix_BHKK, there.state) + map.offset_BHKV;
  expect_near("final_state", state, run(kda_reference, in.to(at::kDouble)).final_state_BHKV, tolerance::kKda);
}

TEST_F(KdaOnCuda, RepeatsGiveTheSameBits) {
  const Inputs in = on_device(Inputs(kLengths, 2, 128, 128).narrow());
  const at::Tensor d_out = at::randn(in.v.sizes()).to(at::kCUDA, at::kBFloat16);
  const at::Tensor d_state = at::randn(in.state.sizes()).to(at::kCUDA);
  const KdaOutput first = run(kda_chunk, in);
  const auto first_grad = gradients(kda_chunk, in, d_out, d_state);
  for (int i = 0; i < 50; ++i) {
    const KdaOutput again = run(kda_chunk, in);
    ASSERT_TRUE(again.out_NHV.equal(first.out_NHV) && again.final_state_BHKV.equal(first.final_state_BHKV));
    const auto grad = gradients(kda_chunk, in, d_out, d_state);
    for (size_t k = 0; k < grad.size(); ++k) ASSERT_TRUE(grad[k].equal(first_grad[k])) << kGradientNames[k];
  }
}

}  // namespace
}  // namespace furlong
