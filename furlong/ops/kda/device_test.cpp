// The ops on CUDA tensors against the recurrence in fp64. Skipped without a GPU; the kernels' own tests need no torch
// (cuda/forward_test.cu and its neighbours).

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "furlong/ops/kda/kda.h"
#include "furlong/ops/norm/norm.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

struct Inputs {
  at::Tensor q, k, v, decay_log, beta, state;

  Inputs(const std::vector<int64_t>& lengths, int64_t H, int64_t K, int64_t V, at::ScalarType dtype) {
    const int64_t N = SequenceLayout::from_lengths(lengths).num_tokens(), B = static_cast<int64_t>(lengths.size());
    q = l2_norm(at::randn({N, H, K})).to(dtype);
    k = l2_norm(at::randn({N, H, K})).to(dtype);
    v = at::randn({N, H, V}).to(dtype);
    decay_log = at::rand({N, H, K}) * -5.0;
    beta = at::rand({N, H});
    state = at::randn({B, H, K, V});
  }
  template <typename Change>
  Inputs with(Change change) const {
    Inputs copy = *this;
    for (at::Tensor* x : {&copy.q, &copy.k, &copy.v, &copy.decay_log, &copy.beta, &copy.state}) *x = change(*x);
    return copy;
  }
};

double relative_error(const at::Tensor& got, const at::Tensor& expected) {
  const at::Tensor wide = expected.to(at::kDouble), difference = got.cpu().to(at::kDouble) - wide;
  return (difference.norm() / wide.norm()).item<double>();
}

TEST(KdaOnCuda, MatchesReference) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  const std::vector<int64_t> lengths = {130, 1, 0, 70};
  const auto host = SequenceLayout::from_lengths(lengths), device = SequenceLayout::from_lengths(lengths, at::kCUDA);
  for (const auto& [K, V] : {std::pair<int64_t, int64_t>{128, 128}, {64, 64}, {60, 100}}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const Inputs in(lengths, 2, K, V, dtype);
      const Inputs exact = in.with([](const at::Tensor& x) { return x.to(at::kDouble); });
      const Inputs there = in.with([](const at::Tensor& x) { return x.to(at::kCUDA); });
      const KdaOutput expected =
          kda_reference(exact.q, exact.k, exact.v, exact.decay_log, exact.beta, host, exact.state, 0.1);
      const KdaOutput got = kda_chunk(there.q, there.k, there.v, there.decay_log, there.beta, device, there.state, 0.1);
      const double limit = dtype == at::kFloat ? tolerance::kFp32Chain : tolerance::kBf16;
      EXPECT_LE(relative_error(got.out_NHV, expected.out_NHV), limit) << K << ' ' << V;
      EXPECT_LE(relative_error(got.final_state_BHKV, expected.final_state_BHKV), limit) << K << ' ' << V;
    }
  }
}

}  // namespace
}  // namespace furlong
