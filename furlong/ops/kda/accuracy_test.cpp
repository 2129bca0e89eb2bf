// Accuracy of kda_chunk on the CPU over everything that makes it hard: lengths, gates, keys, sizes, packs, splits,
// bf16. The oracle is the recurrence in fp64 on the same inputs, for gradients its autograd.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <functional>

#include "furlong/ops/kda/kda.h"
#include "tests/support/kda_inputs.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using namespace testing;

struct Results {
  KdaOutput output;
  std::vector<at::Tensor> gradients;
};

Results results(Form form, const Inputs& in, const at::Tensor& d_out, const at::Tensor& d_state) {
  const at::NoGradGuard no_grad;
  const KdaOutput output = run(form, in);
  const at::AutoGradMode with_grad(true);
  return {output, gradients(form, in, d_out, d_state)};
}

void compare_fp32(const Inputs& in) {
  const at::Tensor d_out = at::randn(in.v.sizes()), d_state = at::randn(in.state.sizes());
  const Results got = results(kda_chunk, in, d_out, d_state);
  const Results expected = results(kda_reference, in.to(at::kDouble), d_out.to(at::kDouble), d_state.to(at::kDouble));
  expect_close("out", got.output.out_NHV, expected.output.out_NHV, tolerance::kKda);
  expect_close("final_state", got.output.final_state_BHKV, expected.output.final_state_BHKV, tolerance::kKda);
  for (size_t i = 0; i < got.gradients.size(); ++i) {
    expect_close(kGradientNames[i], got.gradients[i], expected.gradients[i], tolerance::kKda);
  }
}

double rms(const at::Tensor& x) {
  return x.numel() == 0 ? 0 : x.to(at::kDouble).square().mean().sqrt().item<double>();
}

/// bf16 tensors: at most twice the root-mean-square error of rounding the exact result. fp32 ones: as in fp32.
void expect_rounded(const char* what, const at::Tensor& got, const at::Tensor& exact) {
  if (got.scalar_type() == at::kFloat) return expect_close(what, got, exact, tolerance::kKda);
  const double rounding = rms(exact.to(at::kBFloat16).to(at::kDouble) - exact);
  EXPECT_LE(rms(got.to(at::kDouble) - exact), 2 * rounding) << what;
}

void compare_bf16(const Inputs& in) {
  const at::Tensor d_out = at::randn(in.v.sizes()).to(at::kBFloat16), d_state = at::randn(in.state.sizes());
  const Results got = results(kda_chunk, in.narrow(), d_out, d_state);
  const Results exact =
      results(kda_reference, in.narrow().to(at::kDouble), d_out.to(at::kDouble), d_state.to(at::kDouble));
  expect_rounded("out", got.output.out_NHV, exact.output.out_NHV);
  expect_rounded("final_state", got.output.final_state_BHKV, exact.output.final_state_BHKV);
  for (size_t i = 0; i < got.gradients.size(); ++i) {
    expect_rounded(kGradientNames[i], got.gradients[i], exact.gradients[i]);
  }
}

std::vector<int64_t> every_length() {
  std::vector<int64_t> lengths;
  for (int64_t tokens = 1; tokens <= 130; ++tokens) lengths.push_back(tokens);
  for (const int64_t tokens : {255, 256, 257, 1000}) lengths.push_back(tokens);
  return lengths;
}

void for_every_kind(const std::function<void(Gate, Data)>& body) {
  for (const Gate gate : kGates) {
    for (const Data data : kData) {
      SCOPED_TRACE(::testing::Message() << "gate " << static_cast<int>(gate) << " data " << static_cast<int>(data));
      body(gate, data);
    }
  }
}

TEST(KdaAccuracy, HoldsAtEveryLength) {
  for (const int64_t tokens : every_length()) {
    SCOPED_TRACE(tokens);
    compare_fp32(Inputs({tokens}, 3, 16, 16, kGates[tokens % std::size(kGates)]));
  }
}

TEST(KdaAccuracy, HoldsForEveryKindOfInputAtEveryLength) {
  for_every_kind([](Gate gate, Data data) { compare_fp32(Inputs(every_length(), 1, 16, 24, gate, data)); });
}

TEST(KdaAccuracy, HoldsOver4096Tokens) {
  for (const Gate gate : {Gate::kRandom, Gate::kZero}) {
    SCOPED_TRACE(static_cast<int>(gate));
    compare_fp32(Inputs({4096}, 1, 16, 16, gate));
  }
}

TEST(KdaAccuracy, HoldsOver65536Tokens) {
#ifdef FURLONG_SANITIZED
  GTEST_SKIP() << "the reference takes minutes under a sanitizer";
#endif
  compare_fp32(Inputs({65536}, 1, 8, 8));
}

TEST(KdaAccuracy, HoldsAtHeadSizesFrom16To256) {
  for (const int64_t key_size : {16, 17, 60, 64, 100, 128, 192, 256}) {
    for (const int64_t value_size : {16, 33, 64, 100, 128, 256}) {
      SCOPED_TRACE(::testing::Message() << key_size << " x " << value_size);
      compare_fp32(Inputs({37}, 1, key_size, value_size));
    }
  }
  compare_fp32(Inputs({37}, 2, 5, 3));
}

TEST(KdaAccuracy, HoldsInPacksOf1To64Sequences) {
  for (const int64_t sequences : {1, 2, 3, 8, 31, 64}) {
    SCOPED_TRACE(sequences);
    std::vector<int64_t> lengths;
    for (int64_t b = 0; b < sequences; ++b) lengths.push_back(b % 5 == 1 ? b % 2 : b * 37 % 70 + 1);
    compare_fp32(Inputs(lengths, 2, 16, 24));
  }
}

TEST(KdaAccuracy, HoldsAcrossEverySplit) {
  const at::NoGradGuard no_grad;
  const Inputs in({130}, 2, 16, 24);
  const KdaOutput expected = run(kda_reference, in.to(at::kDouble));
  for (int64_t cut = 1; cut < 130; ++cut) {
    SCOPED_TRACE(cut);
    at::Tensor state = in.state;
    std::vector<at::Tensor> outs;
    for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, cut}, {cut, 130}}) {
      const auto part = [first = first, last = last](const at::Tensor& x) { return x.slice(0, first, last); };
      const KdaOutput got = kda_chunk(part(in.q), part(in.k), part(in.v), part(in.decay_log), part(in.beta),
                                      SequenceLayout::from_lengths({last - first}), state, in.scale());
      outs.push_back(got.out_NHV);
      state = got.final_state_BHKV;
    }
    expect_close("out", at::cat(outs), expected.out_NHV, tolerance::kKda);
    expect_close("final_state", state, expected.final_state_BHKV, tolerance::kKda);
  }
}

TEST(KdaAccuracy, InBf16IsThatOfRoundingTheResult) {
  for_every_kind([](Gate gate, Data data) {
    compare_bf16(Inputs({83, 1, 0, 40}, 2, 64, 48, gate, data));
    compare_bf16(Inputs(every_length(), 1, 16, 16, gate, data));
  });
  compare_bf16(Inputs({1000}, 1, 128, 128));
}

}  // namespace
}  // namespace furlong
