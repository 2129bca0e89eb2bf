// kda_chunk_fused and kda_step_fused_ against the parts that they fuse.

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "furlong/base/error.h"
#include "furlong/ops/kda/kda.h"
#include "furlong/ops/norm/norm.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

struct Inputs {
  at::Tensor q, k, v, z, beta_logit, a_log, dt_bias, state;
  SequenceLayout layout = SequenceLayout::from_lengths({5, 1, 40});

  explicit Inputs(at::ScalarType dtype = at::kFloat) {
    const int64_t N = 46, H = 2, K = 24, V = 32;
    q = at::randn({N, H, K}).to(dtype), k = at::randn({N, H, K}).to(dtype), v = at::randn({N, H, V}).to(dtype);
    z = at::randn({N, H, K}).to(dtype), beta_logit = at::randn({N, H}).to(dtype);
    a_log = at::randn({H}) * 0.3, dt_bias = at::randn({H, K}), state = at::randn({3, H, K, V});
  }
  std::vector<at::Tensor*> tensors() { return {&q, &k, &v, &z, &beta_logit, &a_log, &dt_bias, &state}; }
};

KdaOutput fused(const Inputs& in, double lower_bound) {
  return kda_chunk_fused(in.q, in.k, in.v, in.z, in.beta_logit, in.a_log, in.dt_bias, in.layout, in.state, lower_bound,
                         0.2);
}

KdaOutput parts(const Inputs& in, double lower_bound) {
  const at::Tensor decay_log = lower_bound < 0 ? kda_gate_bounded(in.z, in.a_log, in.dt_bias, lower_bound)
                                               : kda_gate_softplus(in.z, in.a_log, in.dt_bias);
  return kda_chunk(l2_norm(in.q), l2_norm(in.k), in.v, decay_log, at::sigmoid(in.beta_logit.to(at::kFloat)), in.layout,
                   in.state, 0.2);
}

void expect_close(const at::Tensor& got, const at::Tensor& expected, double tolerance) {
  ASSERT_EQ(got.sizes(), expected.sizes());
  EXPECT_LE((got - expected).abs().max().item<double>(), tolerance * expected.abs().max().item<double>());
}

TEST(KdaFused, EqualsItsPartsWithGradients) {
  for (const double lower_bound : {-5.0, 0.0}) {
    std::vector<at::Tensor> gradients[2];
    KdaOutput out[2];
    const Inputs start;
    const at::Tensor d_out = at::randn(start.v.sizes()), d_state = at::randn(start.state.sizes());
    for (int form = 0; form < 2; ++form) {
      Inputs in = start;
      for (at::Tensor* x : in.tensors()) *x = x->detach().clone().requires_grad_();
      out[form] = form == 0 ? fused(in, lower_bound) : parts(in, lower_bound);
      ((out[form].out_NHV * d_out).sum() + (out[form].final_state_BHKV * d_state).sum()).backward();
      for (at::Tensor* x : in.tensors()) gradients[form].push_back(x->grad());
    }
    expect_close(out[0].out_NHV, out[1].out_NHV, tolerance::kFp32Chain);
    expect_close(out[0].final_state_BHKV, out[1].final_state_BHKV, tolerance::kFp32Chain);
    for (size_t i = 0; i < gradients[0].size(); ++i) {
      expect_close(gradients[0][i], gradients[1][i], tolerance::kFp32Chain);
    }
  }
}

TEST(KdaFused, TakesBf16) {
  const at::NoGradGuard no_grad;
  const Inputs in(at::kBFloat16);
  const KdaOutput got = fused(in, -5.0);
  EXPECT_EQ(got.out_NHV.scalar_type(), at::kBFloat16);
  expect_close(got.final_state_BHKV, parts(in, -5.0).final_state_BHKV, tolerance::kBf16);
}

TEST(KdaFused, StepsContinueAChunk) {
  const at::NoGradGuard no_grad;
  for (const double lower_bound : {-5.0, 0.0}) {
    const Inputs in;
    const KdaOutput whole = fused(in, lower_bound);
    at::Tensor pool = in.state.clone();
    const at::Tensor slots = at::arange(2, 3, at::kLong);
    for (int64_t n = 6; n < 46; ++n) {
      const auto row = [&](const at::Tensor& x) { return x.slice(0, n, n + 1); };
      const at::Tensor out = kda_step_fused_(row(in.q), row(in.k), row(in.v), row(in.z), row(in.beta_logit), in.a_log,
                                             in.dt_bias, pool, slots, lower_bound, 0.2);
      expect_close(out, row(whole.out_NHV), 1e-4);
    }
    expect_close(pool[2], whole.final_state_BHKV[2], tolerance::kFp32Chain);
    EXPECT_TRUE(pool[0].equal(in.state[0]));
  }
}

TEST(KdaFused, RefusesBadArguments) {
  Inputs in;
  in.a_log = in.a_log.slice(0, 0, 1);
  EXPECT_THROW(fused(in, -5.0), UsageError);
  Inputs other;
  other.z = other.z.to(at::kDouble);
  EXPECT_THROW(fused(other, -5.0), UsageError);
}

TEST(KdaFused, SchemasHaveAllTheirKeys) {
  for (const char* name : {"furlong::kda_chunk_fused", "furlong::kda_step_fused_"}) {
    const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
    ASSERT_TRUE(op.has_value()) << name;
    for (const auto key :
         {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::Meta, c10::DispatchKey::Autograd}) {
      EXPECT_TRUE(op->hasKernelForDispatchKey(key)) << name << ' ' << toString(key);
    }
  }
  for (const char* name :
       {"furlong::_kda_chunk_forward", "furlong::_kda_chunk_backward", "furlong::_kda_chunk_gradient",
        "furlong::_kda_gate_backward", "furlong::_short_conv_backward"}) {
    const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
    ASSERT_TRUE(op.has_value()) << name;
    EXPECT_TRUE(op->hasKernelForDispatchKey(c10::DispatchKey::Meta)) << name;
  }
}

}  // namespace
}  // namespace furlong
