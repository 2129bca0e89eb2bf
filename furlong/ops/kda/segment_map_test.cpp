// Maps of segments against whole sequences: results and gradients.

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "furlong/ops/kda/kda.h"
#include "furlong/ops/norm/norm.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

struct Inputs {
  at::Tensor q, k, v, decay_log, beta, state;

  Inputs(int64_t N, int64_t H, int64_t K, int64_t V, at::ScalarType dtype) {
    q = l2_norm(at::randn({N, H, K})).to(dtype);
    k = l2_norm(at::randn({N, H, K})).to(dtype);
    v = at::randn({N, H, V}).to(dtype);
    decay_log = (at::rand({N, H, K}) * -0.5).to(dtype);
    beta = at::rand({N, H}).to(dtype);
    state = at::randn({1, H, K, V}).to(dtype);
  }
  std::vector<at::Tensor*> tensors() { return {&q, &k, &v, &decay_log, &beta, &state}; }
  Inputs rows(int64_t first, int64_t last) const {
    Inputs part = *this;
    for (at::Tensor* x : {&part.q, &part.k, &part.v, &part.decay_log, &part.beta}) *x = x->slice(0, first, last);
    return part;
  }
};

double relative_error(const at::Tensor& got, const at::Tensor& expected) {
  return ((got - expected).abs().max() / expected.abs().max()).item<double>();
}

KdaSegmentMap map_of(const Inputs& in) {
  return kda_segment_map(in.k, in.v, in.decay_log, in.beta, SequenceLayout::from_lengths({in.k.size(0)}));
}

KdaOutput chunk_of(const Inputs& in, const at::Tensor& state) {
  return kda_chunk(in.q, in.k, in.v, in.decay_log, in.beta, SequenceLayout::from_lengths({in.k.size(0)}), state, 0.25);
}

TEST(KdaSegmentMap, MapsEnteringToFinalState) {
  for (const auto& [K, V] : {std::pair<int64_t, int64_t>{16, 24}, {128, 128}, {128, 160}}) {
    const Inputs in(70, 2, K, V, at::kFloat);
    const KdaSegmentMap map = map_of(in);
    EXPECT_LE(relative_error(at::matmul(map.matrix_BHKK, in.state) + map.offset_BHKV,
                             chunk_of(in, in.state).final_state_BHKV),
              tolerance::kFp32Chain);
  }
}

TEST(KdaSegmentMap, HoldsOneMapForEachSequence) {
  const Inputs in(50, 2, 16, 8, at::kFloat);
  const KdaSegmentMap pack =
      kda_segment_map(in.k, in.v, in.decay_log, in.beta, SequenceLayout::from_lengths({30, 0, 20}));
  EXPECT_TRUE(pack.matrix_BHKK.slice(0, 0, 1).equal(map_of(in.rows(0, 30)).matrix_BHKK));
  EXPECT_TRUE(pack.offset_BHKV.slice(0, 2, 3).equal(map_of(in.rows(30, 50)).offset_BHKV));
  EXPECT_EQ(pack.offset_BHKV.slice(0, 1, 2).abs().max().item<float>(), 0);
}

/// Four segments as four ranks would work on them: every rank its own map, a scan over the maps, then the outputs.
at::Tensor segmented(const Inputs& in, const std::vector<int64_t>& cuts) {
  at::Tensor entering = in.state;
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const Inputs part = in.rows(cuts[i], cuts[i + 1]);
    outs.push_back(chunk_of(part, entering).out_NHV);
    const KdaSegmentMap map = map_of(part);
    entering = at::matmul(map.matrix_BHKK, entering) + map.offset_BHKV;
  }
  return at::cat(outs);
}

// T33
TEST(KdaSegmentMap, FourSegmentsHaveTheGradientsOfOne) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Inputs in(90, 2, 16, 8, dtype);
    const at::Tensor d_out = at::randn({90, 2, 8}).to(dtype);
    const auto gradients = [&](auto forward) {
      Inputs leaf = in;
      for (at::Tensor* x : leaf.tensors()) *x = x->clone().requires_grad_();
      const at::Tensor out = forward(leaf);
      (out * d_out).sum().backward();
      std::vector<at::Tensor> result{out.detach()};
      for (at::Tensor* x : leaf.tensors()) result.push_back(x->grad());
      return result;
    };
    const auto whole = gradients([](const Inputs& x) { return chunk_of(x, x.state).out_NHV; });
    const auto parts = gradients([](const Inputs& x) { return segmented(x, {0, 20, 45, 77, 90}); });
    const double limit = dtype == at::kFloat ? tolerance::kFp32Chain : tolerance::kFp64;
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_LE(relative_error(parts[i], whole[i]), limit) << i;
  }
}

}  // namespace
}  // namespace furlong
