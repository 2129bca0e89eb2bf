// Faults that other implementations had (docs of the cases: T24 to T35), as tests. T33 stands with the segment maps.
//   N packed tokens   B sequences   H heads   K key size   V value size

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>

#include "furlong/base/error.h"
#include "furlong/ops/kda/kda.h"
#include "furlong/ops/norm/norm.h"
#include "furlong/ops/short_conv/short_conv.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Inputs {
  at::Tensor q, k, v, decay_log, beta;

  Inputs(int64_t N, int64_t H, int64_t K, int64_t V)
      : q(l2_norm(at::randn({N, H, K}))),
        k(l2_norm(at::randn({N, H, K}))),
        v(at::randn({N, H, V})),
        decay_log(at::rand({N, H, K}) * -5.0),
        beta(at::rand({N, H})) {}
  std::vector<at::Tensor*> tensors() { return {&q, &k, &v, &decay_log, &beta}; }
  Inputs rows(int64_t first, int64_t last) const {
    Inputs cut = *this;
    for (at::Tensor* x : cut.tensors()) *x = x->slice(0, first, last);
    return cut;
  }
  Inputs to(at::ScalarType dtype) const {
    Inputs other = *this;
    for (at::Tensor* x : other.tensors()) *x = x->to(dtype);
    return other;
  }
};

KdaOutput chunk(const Inputs& in, const std::vector<int64_t>& lengths, const std::optional<at::Tensor>& state = {}) {
  return kda_chunk(in.q, in.k, in.v, in.decay_log, in.beta, SequenceLayout::from_lengths(lengths), state, 0.125);
}

KdaOutput exact(const Inputs& in, const std::vector<int64_t>& lengths) {
  const Inputs wide = in.to(at::kDouble);
  return kda_reference(wide.q, wide.k, wide.v, wide.decay_log, wide.beta, SequenceLayout::from_lengths(lengths), {},
                       0.125);
}

at::Tensor step(const Inputs& token, at::Tensor& pool, const at::Tensor& slots) {
  return kda_step_(token.q, token.k, token.v, token.decay_log, token.beta, pool, slots, 0.125);
}

void expect_close(const at::Tensor& got, const at::Tensor& expected, double tolerance) {
  const at::Tensor wide = expected.to(at::kDouble);
  EXPECT_LE((got.to(at::kDouble) - wide).abs().max().item<double>(), tolerance * wide.abs().max().item<double>());
}

// T24
TEST(KdaUserCases, StateAfterPrefillOfAnyLengthIsThatOfStepping) {
  const at::NoGradGuard no_grad;
  const Inputs in(130, 2, 32, 32);
  at::Tensor pool = at::zeros({1, 2, 32, 32});
  const at::Tensor slots = at::zeros({1}, at::kLong);
  for (int64_t length = 1; length <= 130; ++length) {
    SCOPED_TRACE(length);
    const at::Tensor out = step(in.rows(length - 1, length), pool, slots);
    const KdaOutput whole = chunk(in.rows(0, length), {length});
    expect_close(whole.final_state_BHKV, pool, tolerance::kFp32Chain);
    expect_close(whole.out_NHV.slice(0, length - 1), out, tolerance::kFp32Chain);
  }
}

// T25
TEST(KdaUserCases, OddHeadSizesNeverReadTheirNeighbours) {
  const at::NoGradGuard no_grad;
  for (const int64_t size : {60, 100}) {
    const Inputs in(37, 2, size, size);
    Inputs fenced = in;
    for (at::Tensor* x : fenced.tensors()) {  // values in the middle of NaN, in front, behind and between rows
      std::vector<int64_t> sizes = x->sizes().vec();
      for (int64_t& n : sizes) n += 2;
      at::Tensor wide = at::full(sizes, kNaN);
      at::Tensor inner = wide;
      for (int64_t d = 0; d < x->dim(); ++d) inner = inner.slice(d, 1, x->size(d) + 1);
      inner.copy_(*x);
      *x = inner;
    }
    const KdaOutput got = chunk(fenced, {37}), expected = chunk(in, {37});
    EXPECT_TRUE(got.out_NHV.equal(expected.out_NHV));
    EXPECT_TRUE(got.final_state_BHKV.equal(expected.final_state_BHKV));
  }
}

// T26
TEST(KdaUserCases, PaddingHasGradientsOfZero) {
  Inputs in(25, 2, 32, 32);
  for (at::Tensor* x : in.tensors()) {
    x->slice(0, 20).fill_(kNaN);
    x->requires_grad_();
  }
  chunk(in, {13, 7}).out_NHV.slice(0, 0, 20).sum().backward();
  for (at::Tensor* x : in.tensors()) {
    EXPECT_EQ(x->grad().slice(0, 20).abs().max().item<float>(), 0.0f);
    EXPECT_TRUE(x->grad().isfinite().all().item<bool>());
  }
}

// T27, T35
TEST(KdaUserCases, SequencesDoNotFeelTheirNeighbours) {
  const at::NoGradGuard no_grad;
  const std::vector<int64_t> lengths{1, 1, 150, 1, 33, 1};
  const Inputs in(187, 2, 32, 32);
  const KdaOutput packed = chunk(in, lengths);
  int64_t start = 0;
  for (size_t b = 0; b < lengths.size(); ++b) {
    const KdaOutput alone = chunk(in.rows(start, start + lengths[b]), {lengths[b]});
    EXPECT_TRUE(alone.out_NHV.equal(packed.out_NHV.slice(0, start, start + lengths[b])));
    EXPECT_TRUE(alone.final_state_BHKV[0].equal(packed.final_state_BHKV[static_cast<int64_t>(b)]));
    start += lengths[b];
  }
}

// T28
TEST(KdaUserCases, RepeatsGiveTheSameBits) {
  const at::NoGradGuard no_grad;
  for (const int64_t length : {1, 2, 7, 15, 47}) {
    const Inputs in(length, 2, 64, 64);
    const KdaOutput first = chunk(in, {length});
    for (int i = 0; i < 50; ++i) {
      const KdaOutput again = chunk(in, {length});
      ASSERT_TRUE(again.out_NHV.equal(first.out_NHV));
      ASSERT_TRUE(again.final_state_BHKV.equal(first.final_state_BHKV));
    }
  }
}

// T29
TEST(KdaUserCases, StrongForgettingStaysFiniteAndRight) {
  const at::NoGradGuard no_grad;
  for (const double decay : {-4.0, -8.0, -1000.0, 0.0}) {
    SCOPED_TRACE(decay);
    Inputs in(130, 2, 32, 32);
    in.decay_log.fill_(decay);
    const KdaOutput got = chunk(in, {130}), expected = exact(in, {130});
    expect_close(got.out_NHV, expected.out_NHV, tolerance::kFp32Chain);
    expect_close(got.final_state_BHKV, expected.final_state_BHKV, tolerance::kFp32Chain);
  }
}

// T30
TEST(KdaUserCases, SlowDecayKeepsItsAccuracyOver4096Tokens) {
  const at::NoGradGuard no_grad;
  Inputs in(4096, 1, 16, 16);
  in.decay_log.fill_(-1e-4);
  in.beta = in.beta.to(at::kBFloat16).to(at::kFloat);
  const at::Tensor expected = exact(in, {4096}).final_state_BHKV;
  expect_close(chunk(in, {4096}).final_state_BHKV, expected, 1e-5);
  at::Tensor pool = at::zeros({1, 1, 16, 16});
  const at::Tensor slots = at::zeros({1}, at::kLong);
  for (int64_t t = 0; t < 4096; ++t) step(in.rows(t, t + 1), pool, slots);
  expect_close(pool, expected, 1e-5);
}

// T31
TEST(KdaUserCases, LargeReadoutsReachTheNormUnharmed) {
  const at::NoGradGuard no_grad;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Inputs in(64, 1, 32, 32);
    in.decay_log.fill_(-1e-4);
    in.v.mul_(1e6);
    const at::Tensor out = kda_chunk(in.q.to(dtype), in.k.to(dtype), in.v.to(dtype), in.decay_log, in.beta,
                                     SequenceLayout::from_lengths({64}), {}, 1.0)
                               .out_NHV;
    EXPECT_GT(out.abs().max().item<float>(), 65504.0f);
    const at::Tensor normed = gated_rms_norm(out, at::full({32}, 1.0), at::randn({64, 1, 32}).to(dtype), 1e-5);
    EXPECT_TRUE(normed.isfinite().all().item<bool>());
  }
}

// T32
TEST(KdaUserCases, PrefillInPiecesIsPrefillAtOnce) {
  const at::NoGradGuard no_grad;
  const int64_t N = 70, P = 64;
  const at::Tensor x = at::randn({N, P}), weight = at::randn({P, 4});
  const auto [y, tail] = short_conv(x, weight, SequenceLayout::from_lengths({N}), {});
  const Inputs in(N, 2, 32, 32);
  const KdaOutput whole = chunk(in, {N});
  for (const int64_t piece : {1, 2, 3, 5, 64}) {
    SCOPED_TRACE(piece);
    at::Tensor conv_state = at::zeros({1, 3, P}), state = at::zeros({1, 2, 32, 32});
    std::vector<at::Tensor> ys, outs;
    for (int64_t first = 0; first < N; first += piece) {
      const int64_t last = std::min(first + piece, N);
      const auto [part, next] =
          short_conv(x.slice(0, first, last), weight, SequenceLayout::from_lengths({last - first}), conv_state);
      const KdaOutput out = chunk(in.rows(first, last), {last - first}, state);
      ys.push_back(part), outs.push_back(out.out_NHV);
      conv_state = next, state = out.final_state_BHKV;
    }
    EXPECT_TRUE(at::cat(ys).equal(y));
    EXPECT_TRUE(conv_state.equal(tail));
    expect_close(at::cat(outs), whole.out_NHV, tolerance::kFp32Chain);
    expect_close(state, whole.final_state_BHKV, tolerance::kFp32Chain);
  }
  at::Tensor pool = at::zeros({2, 2, 32, 32}), tails = at::zeros({2, 3, P});
  const at::Tensor last_slot = at::full({1}, -1, at::kLong);
  EXPECT_THROW(step(in.rows(0, 1), pool, last_slot), UsageError);
  EXPECT_THROW(short_conv_step_(x.slice(0, 0, 1), weight, tails, last_slot), UsageError);
}

// T34: rows so far apart that an element's index needs more than 31 bits. Untouched pages of the buffer cost nothing.
TEST(KdaUserCases, RowsBeyondTwoToThe31ElementsAreFound) {
  const at::NoGradGuard no_grad;
  const int64_t N = 3, H = 1, K = 16, stride = (int64_t{1} << 30) + 64;
  at::Tensor buffer;
  try {
    buffer = at::empty({(N - 1) * stride + 6 * K});
  } catch (const std::exception& error) {
    GTEST_SKIP() << "no 8 GB of address space: " << error.what();
  }
  const Inputs in(N, H, K, K);
  Inputs far = in;
  int64_t column = 0;
  for (at::Tensor* x : far.tensors()) {
    std::vector<int64_t> strides{stride, K, 1};
    strides.resize(static_cast<size_t>(x->dim()));
    at::Tensor view = buffer.as_strided(x->sizes(), strides, column);
    view.copy_(*x);
    *x = view;
    column += K;
  }
  const KdaOutput got = chunk(far, {N}), expected = chunk(in, {N});
  EXPECT_TRUE(got.out_NHV.equal(expected.out_NHV));
  EXPECT_TRUE(got.final_state_BHKV.equal(expected.final_state_BHKV));
  const at::Tensor weight = at::randn({K, 4});
  const auto layout = SequenceLayout::from_lengths({N});
  EXPECT_TRUE(std::get<0>(short_conv(far.v.squeeze(1), weight, layout, {}))
                  .equal(std::get<0>(short_conv(in.v.squeeze(1), weight, layout, {}))));
  at::Tensor pool = at::zeros({N, H, K, K}), far_pool = pool.clone();
  const at::Tensor slots = at::arange(N, at::kLong);
  EXPECT_TRUE(step(far, far_pool, slots).equal(step(in, pool, slots)));
}

}  // namespace
}  // namespace furlong
