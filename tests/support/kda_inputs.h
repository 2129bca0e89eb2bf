#pragma once

// What the tests of kda_chunk share: inputs of many kinds, gradients, errors.
//   N packed tokens   B sequences   H heads   K key size   V value size

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "furlong/ops/kda/kda.h"
#include "furlong/ops/norm/norm.h"
#include "tests/support/gradient.h"

namespace furlong::testing {

enum class Gate {
  kRandom,    // uniform between 0 and the bound of -5
  kAtBound,   // -5
  kZero,      // nothing is forgotten
  kMixed,     // -5 or 0 for each channel, as a gate at its limits gives
  kSoftplus,  // unbounded
  kAbrupt     // one channel in twenty forgets everything (-1000), the others little
};
constexpr Gate kGates[] = {Gate::kRandom, Gate::kAtBound, Gate::kZero, Gate::kMixed, Gate::kSoftplus, Gate::kAbrupt};

enum class Data {
  kGaussian,
  kRepeated,  // five keys come again and again, beta near 1: A is as large as it gets
  kOutliers   // one value in 64 is 100 times as large
};
constexpr Data kData[] = {Data::kGaussian, Data::kRepeated, Data::kOutliers};

inline at::Tensor decay_of(Gate gate, at::IntArrayRef shape) {
  switch (gate) {
    case Gate::kRandom:
      return at::rand(shape) * -5.0;
    case Gate::kAtBound:
      return at::full(shape, -5.0);
    case Gate::kZero:
      return at::zeros(shape);
    case Gate::kMixed:
      return at::rand(shape).lt(0.5).to(at::kFloat) * -5.0;
    case Gate::kSoftplus:
      return at::randn(shape).exp() * -1.0;
    case Gate::kAbrupt:
      return at::rand(shape) * -0.1 - at::rand(shape).lt(0.05).to(at::kFloat) * 1000.0;
  }
  return {};
}

struct Inputs {
  at::Tensor q, k, v, decay_log, beta, state;
  SequenceLayout layout;

  Inputs(const std::vector<int64_t>& lengths, int64_t H, int64_t K, int64_t V, Gate gate = Gate::kRandom,
         Data data = Data::kGaussian, int64_t extra_rows = 0)
      : layout(SequenceLayout::from_lengths(lengths)) {
    const int64_t N = layout.num_tokens() + extra_rows;
    q = l2_norm(at::randn({N, H, K}));
    k = l2_norm(at::randn({N, H, K}));
    v = at::randn({N, H, V});
    decay_log = decay_of(gate, {N, H, K});
    beta = at::rand({N, H});
    state = at::randn({layout.num_sequences(), H, K, V});
    if (data == Data::kRepeated) {
      const at::Tensor few = at::randn({5, H, K}).index_select(0, at::arange(N, at::kLong).remainder(5));
      k = l2_norm(few + 0.1 * at::randn({N, H, K}));
      beta = at::sigmoid(at::randn({N, H}) + 4);
    }
    if (data == Data::kOutliers) v = at::where(at::rand(v.sizes()).lt(1.0 / 64), 100 * v, v);
  }

  std::vector<at::Tensor*> tensors() { return {&q, &k, &v, &decay_log, &beta, &state}; }
  Inputs to(at::ScalarType dtype) const {
    Inputs copy = *this;
    for (at::Tensor* x : copy.tensors()) *x = x->to(dtype);
    return copy;
  }
  /// q, k and v rounded to bf16, the rest in fp32: what a model in bf16 gives.
  Inputs narrow() const {
    Inputs copy = *this;
    for (at::Tensor* x : {&copy.q, &copy.k, &copy.v}) *x = x->to(at::kBFloat16);
    return copy;
  }
  double scale() const { return 1.0 / std::sqrt(static_cast<double>(q.size(2))); }
};

using Form = KdaOutput (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const SequenceLayout&, const std::optional<at::Tensor>&, double);

inline KdaOutput run(Form form, const Inputs& in) {
  return form(in.q, in.k, in.v, in.decay_log, in.beta, in.layout, in.state, in.scale());
}

/// Gradients of sum(d_out out) + sum(d_state final_state) at q, k, v, decay_log, beta, initial state.
inline std::vector<at::Tensor> gradients(Form form, const Inputs& inputs, const at::Tensor& d_out,
                                         const at::Tensor& d_state) {
  Inputs in = inputs;
  for (at::Tensor* x : in.tensors()) *x = x->detach().clone().requires_grad_();
  const KdaOutput got = run(form, in);
  const int64_t tokens = in.layout.num_tokens();
  ((got.out_NHV * d_out.to(got.out_NHV.scalar_type())).slice(0, 0, tokens).sum().to(d_state.scalar_type()) +
   (got.final_state_BHKV * d_state).sum())
      .backward();
  std::vector<at::Tensor> result;
  // Without tokens the reference does not connect its result to the inputs.
  for (at::Tensor* x : in.tensors()) result.push_back(x->grad().defined() ? x->grad() : at::zeros_like(*x));
  return result;
}
constexpr const char* kGradientNames[] = {"d_q", "d_k", "d_v", "d_decay_log", "d_beta", "d_initial_state"};

inline void expect_close(const char* what, const at::Tensor& got, const at::Tensor& expected, double tolerance) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_LE(relative_error(got, expected), tolerance) << what;
}

}  // namespace furlong::testing
