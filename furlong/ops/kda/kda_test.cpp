#include "furlong/ops/kda/kda.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <limits>

#include "furlong/base/error.h"
#include "furlong/ops/norm/norm.h"
#include "tests/support/kda_inputs.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using namespace testing;

/// Forward and all gradients in fp32 against the recurrence in fp64.
void compare_with_reference(const Inputs& in) {
  const Inputs exact = in.to(at::kDouble);
  const KdaOutput got = run(kda_chunk, in), expected = run(kda_reference, exact);
  expect_close("out", got.out_NHV, expected.out_NHV, tolerance::kFp32Chain);
  expect_close("final_state", got.final_state_BHKV, expected.final_state_BHKV, tolerance::kFp32Chain);
  const at::Tensor d_out = at::randn(in.v.sizes()), d_state = at::randn(in.state.sizes());
  const auto got_grad = gradients(kda_chunk, in, d_out, d_state);
  const auto expected_grad = gradients(kda_reference, exact, d_out.to(at::kDouble), d_state.to(at::kDouble));
  for (size_t i = 0; i < got_grad.size(); ++i) {
    expect_close(kGradientNames[i], got_grad[i], expected_grad[i], tolerance::kFp32Chain);
  }
}

TEST(KdaChunk, MatchesReferenceOnRaggedPack) {
  compare_with_reference(Inputs({5, 0, 1, 33, 1, 64, 0, 17}, 2, 16, 32));
  compare_with_reference(Inputs({0}, 2, 16, 16));
  compare_with_reference(Inputs({}, 2, 16, 16));
}

TEST(KdaChunk, KeepsGradientsOfVanishingDecays) {
  // d_decay_log is 1e-9 of what its parts would be if they were allowed to cancel.
  Inputs in({65}, 1, 16, 16);
  in.decay_log = at::full(in.decay_log.sizes(), -20.0);
  compare_with_reference(in);
}

TEST(KdaChunk, NeverReadsRowsPastTheLastSequence) {
  Inputs in({9, 20}, 2, 16, 16, Gate::kRandom, Data::kGaussian, /*extra_rows=*/6);
  Inputs whole = in;
  for (at::Tensor* x : {&whole.q, &whole.k, &whole.v, &whole.decay_log, &whole.beta}) *x = x->slice(0, 0, 29).clone();
  for (at::Tensor* x : {&in.q, &in.k, &in.v, &in.decay_log, &in.beta}) {
    x->slice(0, 29).fill_(std::numeric_limits<float>::quiet_NaN());
  }
  for (const Form form : {kda_chunk, kda_reference}) {
    const KdaOutput got = run(form, in);
    EXPECT_TRUE(got.out_NHV.slice(0, 0, 29).equal(run(form, whole).out_NHV));
    EXPECT_EQ(got.out_NHV.slice(0, 29).abs().max().item<float>(), 0.0f);
  }
  at::Tensor d_out = at::randn(in.v.sizes());
  const auto grads = gradients(kda_chunk, in, d_out, at::randn(in.state.sizes()));
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(grads[i].slice(0, 29).abs().max().item<float>(), 0.0f);
}

TEST(KdaChunk, SplitEqualsWhole) {
  const Inputs in({100}, 2, 16, 16);
  const KdaOutput whole = run(kda_chunk, in);
  for (const int64_t cut : {1, 16, 32, 33, 64, 99}) {
    SCOPED_TRACE(cut);
    at::Tensor state = in.state;
    std::vector<at::Tensor> outs;
    for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, cut}, {cut, 100}}) {
      const auto part = [&](const at::Tensor& x) { return x.slice(0, first, last); };
      const KdaOutput got = kda_chunk(part(in.q), part(in.k), part(in.v), part(in.decay_log), part(in.beta),
                                      SequenceLayout::from_lengths({last - first}), state, in.scale());
      outs.push_back(got.out_NHV);
      state = got.final_state_BHKV;
    }
    expect_close("out", at::cat(outs), whole.out_NHV, tolerance::kFp32Chain);
    expect_close("final_state", state, whole.final_state_BHKV, tolerance::kFp32Chain);
    // On the chunk grid the two runs do the same arithmetic.
    if (cut % 32 == 0) {
      EXPECT_TRUE(at::cat(outs).equal(whole.out_NHV));
    }
  }
}

TEST(KdaChunk, PackedEqualsSeparate) {
  const Inputs in({40, 25}, 2, 16, 16);
  const KdaOutput packed = run(kda_chunk, in);
  const auto part = [](const at::Tensor& x) { return x.slice(0, 40); };
  const KdaOutput second = kda_chunk(part(in.q), part(in.k), part(in.v), part(in.decay_log), part(in.beta),
                                     SequenceLayout::from_lengths({25}), in.state.slice(0, 1), in.scale());
  EXPECT_TRUE(packed.out_NHV.slice(0, 40).equal(second.out_NHV));
}

TEST(KdaChunk, TakesBf16AndStridedInputs) {
  const Inputs wide({50}, 2, 16, 16);
  Inputs in = wide;
  for (at::Tensor* x : {&in.q, &in.k, &in.v}) *x = x->to(at::kBFloat16);
  Inputs exact = in;
  for (at::Tensor* x : exact.tensors()) *x = x->to(at::kFloat);
  const KdaOutput got = run(kda_chunk, in), expected = run(kda_reference, exact);
  EXPECT_EQ(got.out_NHV.scalar_type(), at::kBFloat16);
  expect_close("out", got.out_NHV, expected.out_NHV, tolerance::kBf16);
  expect_close("final_state", got.final_state_BHKV, expected.final_state_BHKV, tolerance::kFp32Chain);
  const at::Tensor d_out = at::randn(in.v.sizes()).to(at::kBFloat16), d_state = at::randn(in.state.sizes());
  const auto grad = gradients(kda_chunk, in, d_out, d_state);
  const auto expected_grad = gradients(kda_reference, exact, d_out.to(at::kFloat), d_state);
  for (size_t i = 0; i < grad.size(); ++i) {
    EXPECT_EQ(grad[i].scalar_type(), i < 3 ? at::kBFloat16 : at::kFloat);
    expect_close("gradient", grad[i], expected_grad[i], tolerance::kBf16);
  }

  Inputs strided = wide;
  const at::Tensor row = at::cat({wide.q, wide.k}, 2);
  strided.q = row.slice(2, 0, 16);
  strided.k = row.slice(2, 16, 32);
  EXPECT_TRUE(run(kda_chunk, strided).out_NHV.equal(run(kda_chunk, wide).out_NHV));
}

TEST(KdaChunk, GradientOfReferenceMatchesFiniteDifferences) {
  const Inputs in = Inputs({4, 3}, 1, 3, 2).to(at::kDouble);
  const at::Tensor d_out = at::randn(in.v.sizes(), at::kDouble), d_state = at::randn(in.state.sizes(), at::kDouble);
  const auto loss = [&](const Inputs& at_point) {
    const KdaOutput got = run(kda_chunk, at_point);
    return ((got.out_NHV * d_out).sum() + (got.final_state_BHKV * d_state).sum()).item<double>();
  };
  const auto grad = gradients(kda_chunk, in, d_out, d_state);
  constexpr double step = 1e-5;
  for (size_t i = 0; i < grad.size(); ++i) {
    at::Tensor numeric = at::zeros_like(grad[i]);
    for (int64_t n = 0; n < numeric.numel(); ++n) {
      Inputs up = in, down = in;
      for (auto [point, sign] : {std::pair<Inputs*, double>{&up, step}, {&down, -step}}) {
        at::Tensor& x = *point->tensors()[i];
        x = x.clone();
        x.view({-1})[n] += sign;
      }
      numeric.view({-1})[n] = (loss(up) - loss(down)) / (2 * step);
    }
    expect_close("gradient", grad[i], numeric, tolerance::kFiniteDifference);
  }
}

TEST(KdaStep, EqualsChunkTokenByToken) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t V : {16, 100}) {
      Inputs in({1, 1, 1}, 2, 24, V);
      for (at::Tensor* x : {&in.q, &in.k, &in.v}) *x = x->to(dtype);
      at::Tensor pool = at::randn({5, 2, 24, V});
      const at::Tensor before = pool.clone(), slots = at::tensor(std::vector<int64_t>{4, 0, 2});
      in.state = pool.index_select(0, slots);
      const KdaOutput expected = run(kda_chunk, in);
      const at::Tensor out = kda_step_(in.q, in.k, in.v, in.decay_log, in.beta, pool, slots, in.scale());
      expect_close("out", out, expected.out_NHV, dtype == at::kFloat ? tolerance::kFp32 : tolerance::kBf16);
      expect_close("state", pool.index_select(0, slots), expected.final_state_BHKV, tolerance::kFp32);
      EXPECT_TRUE(pool[1].equal(before[1]) && pool[3].equal(before[3]));
    }
  }
}

TEST(KdaStep, IsRefusedUnderAutograd) {
  const Inputs in({1}, 1, 16, 16);
  at::Tensor pool = at::zeros({1, 1, 16, 16});
  const at::Tensor slots = at::zeros({1}, at::kLong), q = in.q.clone().requires_grad_();
  EXPECT_THROW(kda_step_(q, in.k, in.v, in.decay_log, in.beta, pool, slots, 1), UsageError);
  const at::NoGradGuard no_grad;
  EXPECT_NO_THROW(kda_step_(q, in.k, in.v, in.decay_log, in.beta, pool, slots, 1));
}

TEST(KdaStep, RefusesSlotsOutsideThePool) {
  const Inputs in({1}, 1, 16, 16);
  at::Tensor pool = at::zeros({1, 1, 16, 16});
  EXPECT_THROW(kda_step_(in.q, in.k, in.v, in.decay_log, in.beta, pool, at::full({1}, 1, at::kLong), 1), UsageError);
}

TEST(KdaChunk, RefusesBadShapes) {
  const Inputs good({4}, 4, 16, 16);
  Inputs in = good;
  in.beta = in.beta.slice(1, 0, 3);
  try {
    run(kda_chunk, in);
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "[kda_chunk] beta_NH: got [4, 3], need [4, 4]");
  }
  in = good;
  in.decay_log = in.decay_log.to(at::kBFloat16);
  EXPECT_THROW(run(kda_chunk, in), UsageError);
  in = good;
  in.layout = SequenceLayout::from_lengths({5});
  EXPECT_THROW(run(kda_chunk, in), UsageError);
}

void compare_gate(bool bounded, at::ScalarType dtype) {
  const at::Tensor z = (at::randn({150, 3, 20}) * 8).to(dtype), a_log = at::randn({3}), bias = at::randn({3, 20});
  const at::Tensor d_g = at::randn({150, 3, 20});
  const auto gate = [&](std::vector<at::Tensor> in) {
    for (at::Tensor& x : in) x.requires_grad_();
    const at::Tensor g = bounded ? kda_gate_bounded(in[0], in[1], in[2], -5) : kda_gate_softplus(in[0], in[1], in[2]);
    (g * d_g.to(g.scalar_type())).sum().backward();
    return std::vector<at::Tensor>{g.detach(), in[0].grad(), in[1].grad(), in[2].grad()};
  };
  const auto copy = [](const at::Tensor& x) { return x.detach().clone(); };
  const auto got = gate({copy(z), copy(a_log), copy(bias)});
  const auto expected = gate({z.to(at::kDouble), a_log.to(at::kDouble), bias.to(at::kDouble)});
  EXPECT_EQ(got[0].scalar_type(), at::kFloat);
  expect_close("decay_log", got[0], expected[0], tolerance::kFp32);
  expect_close("d_z", got[1], expected[1], dtype == at::kFloat ? tolerance::kFp32 : tolerance::kBf16);
  expect_close("d_a_log", got[2], expected[2], tolerance::kFp32Chain);
  expect_close("d_dt_bias", got[3], expected[3], tolerance::kFp32Chain);
}

TEST(KdaGate, MatchesReferenceWithGradients) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    compare_gate(true, dtype);
    compare_gate(false, dtype);
  }
}

TEST(KdaGate, GradientOfReferenceMatchesFiniteDifferences) {
  const auto draw = [](at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); };
  const Tensors inputs{draw({3, 2, 4}) * 3, draw({2}), draw({2, 4})};
  const at::Tensor d_g = draw({3, 2, 4});
  const auto bounded = [](const Tensors& x) { return kda_gate_bounded(x[0], x[1], x[2], -5); };
  const auto softplus = [](const Tensors& x) { return kda_gate_softplus(x[0], x[1], x[2]); };
  EXPECT_LE(finite_difference_error(bounded, inputs, d_g), tolerance::kFiniteDifference);
  EXPECT_LE(finite_difference_error(softplus, inputs, d_g), tolerance::kFiniteDifference);
}

TEST(KdaGate, StaysInsideItsBounds) {
  const at::Tensor z = at::tensor(std::vector<float>{-1e4f, -50.f, 0.f, 50.f, 1e4f}).view({5, 1, 1});
  const at::Tensor g = kda_gate_bounded(z, at::zeros({1}), at::zeros({1, 1}), -5);
  EXPECT_TRUE(g.le(0).logical_and(g.ge(-5)).all().item<bool>());
  EXPECT_TRUE(kda_gate_softplus(z, at::zeros({1}), at::zeros({1, 1})).le(0).all().item<bool>());
}

TEST(KdaSchemas, HaveAllTheirKeys) {
  using Key = c10::DispatchKey;
  const std::vector<Key> all = {Key::CPU, Key::CUDA, Key::Meta, Key::Autograd};
  const std::vector<std::pair<const char*, std::vector<Key>>> schemas = {
      {"furlong::kda_chunk", all},
      {"furlong::kda_step_", all},
      {"furlong::kda_gate_bounded", all},
      {"furlong::kda_gate_softplus", all},
      {"furlong::kda_reference", {Key::CompositeImplicitAutograd}},
      {"furlong::kda_segment_map", {Key::CompositeImplicitAutograd}},
      {"furlong::_kda_chunk_forward", {Key::CPU}},
      {"furlong::_kda_chunk_backward", {Key::CPU}},
      {"furlong::_kda_gate_backward", {Key::CPU}}};
  for (const auto& [name, keys] : schemas) {
    const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
    ASSERT_TRUE(op.has_value()) << name;
    for (const Key key : keys) EXPECT_TRUE(op->hasKernelForDispatchKey(key)) << name << ' ' << toString(key);
  }
}

}  // namespace
}  // namespace furlong
