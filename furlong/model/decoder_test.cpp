// The decoder as a whole: one sequence gives the same whether it is run at once, in pieces, token by token or packed
// between others, and recomputation changes no bit of a gradient.

#include "furlong/model/decoder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cosine_similarity.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <array>

#include "furlong/model/state.h"
#include "furlong/model/test_model.h"
#include "furlong/ops/moe/layer.h"
#include "tests/support/split_run.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using testing_support::feed;
using testing_support::find_routing_flips;
using testing_support::next_token_loss;
using testing_support::Piece;
using testing_support::RoutingFlip;
using testing_support::run_split;
using testing_support::run_whole;
using testing_support::state_error;
using testing_support::take_gradients;
using testing_support::WholeRun;

constexpr int64_t kTokens = 133;  // two chunks of 64 and a rest

struct Variant {
  std::string name;
  std::vector<std::string> assignments;
};

const std::array kVariants = {
    Variant{"K3", {}},
    Variant{"KimiLinear",
            {"attnres_block_size=0", "activation=swiglu", "kda.gate_lower_bound=0", "kda.full_rank_gate=false",
             "mla.q_lora_rank=0", "mla.output_gate=false", "moe.latent_size=0", "moe.routed_scale=2.446"}},
    Variant{"PlainResiduals", {"attnres_block_size=0"}},
    Variant{"DenseOnly", {"moe.num_experts=0"}},
    Variant{"AllKda", {"full_attention_layers=[]"}},
    Variant{"AllMla", {"full_attention_layers=[1, 2, 3, 4, 5]"}},
    Variant{"GroupedExpertsNoShared",
            {"moe.expert_groups=4", "moe.expert_groups_kept=2", "moe.shared_experts=0", "moe.renormalize=false"}},
    Variant{"TiedEveryOtherMoe", {"tie_embeddings=true", "moe.layer_freq=2", "moe.first_dense_layers=0"}},
};

class DecoderVariant : public ::testing::TestWithParam<Variant> {
 protected:
  std::unique_ptr<Decoder> decoder_ = tiny_decoder(GetParam().assignments);
};

TEST_P(DecoderVariant, SplitEqualsWhole) {
  const WholeRun whole = run_whole(*decoder_, random_tokens(kTokens, decoder_->config().vocab_size, 5));
  const auto [reference_logits, reference_state] = run_split(*decoder_, whole, kTokens);
  EXPECT_LE(relative_error(reference_logits, whole.logits_NV), tolerance::kLogitsSplit);
  const std::vector<int64_t> all = {1, 2, 3, 5, 16, 63, 64, 65}, few = {1, 5, 65};
  for (const int64_t chunk : GetParam().name == "K3" ? all : few) {
    SCOPED_TRACE(chunk);
    const auto [logits, state] = run_split(*decoder_, whole, chunk);
    EXPECT_LE(relative_error(logits, whole.logits_NV), tolerance::kLogitsSplit);
    EXPECT_LE(state_error(state, reference_state), tolerance::kStateSplit);
  }
}

TEST_P(DecoderVariant, RecomputationChangesNoBitOfAGradient) {
  const at::Tensor tokens = random_tokens(90, decoder_->config().vocab_size, 6);
  const auto layout = SequenceLayout::from_lengths({50, 39});
  std::vector<std::vector<at::Tensor>> grads;
  for (const bool recompute : {false, true}) {
    ForwardOptions options;
    options.recompute = recompute;
    options.training = true;
    for (const Param& param : decoder_->params()) param.tensor->mutable_grad() = at::Tensor();
    decoder_->forward(tokens, layout, nullptr, options).pow(2).sum().backward();
    grads.emplace_back();
    for (const Param& param : decoder_->params()) grads.back().push_back(param.tensor->grad());
  }
  for (size_t i = 0; i < grads[0].size(); ++i) {
    const std::string& name = decoder_->params()[i].spec.name;
    ASSERT_EQ(grads[0][i].defined(), grads[1][i].defined()) << name;
    EXPECT_TRUE(!grads[0][i].defined() || at::equal(grads[0][i], grads[1][i])) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, DecoderVariant, ::testing::ValuesIn(kVariants),
                         [](const auto& info) { return info.param.name; });

class DecoderTest : public ::testing::Test {
 protected:
  std::unique_ptr<Decoder> decoder_ = tiny_decoder();
};

TEST_F(DecoderTest, PackedBetweenOthersEqualsAlone) {
  const at::NoGradGuard no_grad;
  const WholeRun a = run_whole(*decoder_, random_tokens(70, 256, 1)),
                 b = run_whole(*decoder_, random_tokens(97, 256, 2)),
                 c = run_whole(*decoder_, random_tokens(33, 256, 3));
  DecoderState state(*decoder_, 4);
  // Ragged prefill, a call where only some go on, mixed prefill and decode, then decode of all.
  const std::vector<std::vector<Piece>> calls = {
      {{&a, 3, 0, 20}, {&b, 0, 0, 64}, {&c, 2, 0, 1}},
      {{&b, 0, 64, 65}, {&c, 2, 1, 32}},
      {{&a, 3, 20, 69}, {&b, 0, 65, 96}},
      {{&c, 2, 32, 33}, {&a, 3, 69, 70}, {&b, 0, 96, 97}},
  };
  for (const auto& pieces : calls) {
    const at::Tensor logits_NV = decoder_->logits(feed(*decoder_, state, pieces));
    int64_t start = 0;
    for (const Piece& piece : pieces) {
      const int64_t length = piece.last - piece.first;
      EXPECT_LE(relative_error(logits_NV.slice(0, start, start + length),
                               piece.run->logits_NV.slice(0, piece.first, piece.last)),
                tolerance::kLogitsSplit);
      start += length;
    }
  }
  EXPECT_LE(state_error(state.snapshot(0), run_split(*decoder_, b, 97).state), tolerance::kStateSplit);
}

TEST_F(DecoderTest, UnforcedRoutingFlipsOnlyAtTinyMargins) {
  const at::NoGradGuard no_grad;
  const at::Tensor tokens_N = random_tokens(kTokens, 256, 5);
  const WholeRun whole = run_whole(*decoder_, tokens_N);
  for (const RoutingFlip& flip : find_routing_flips(*decoder_, whole, 1)) {
    EXPECT_LT(flip.margin, 1e-4) << "token " << flip.token << " layer " << flip.layer;
  }
}

TEST_F(DecoderTest, PackedLossAndGradientsEqualThoseOfSeparateDocuments) {
  const std::vector<int64_t> lengths = {1, 40, 17, 66, 3};
  const at::Tensor tokens_N = random_tokens(127, 256, 8);
  const at::Tensor packed = next_token_loss(*decoder_, tokens_N, lengths);
  packed.backward();
  const std::vector<at::Tensor> packed_grads = take_gradients(*decoder_);
  double separate = 0.0;
  int64_t start = 0;
  for (const int64_t length : lengths) {
    const at::Tensor loss = next_token_loss(*decoder_, tokens_N.slice(0, start, start + length), {length});
    loss.backward();
    separate += loss.item<double>();
    start += length;
  }
  EXPECT_NEAR(packed.item<double>() / separate, 1.0, tolerance::kFp32Chain);
  const std::vector<at::Tensor> separate_grads = take_gradients(*decoder_);
  for (size_t i = 0; i < packed_grads.size(); ++i) {
    if (!separate_grads[i].defined()) continue;
    EXPECT_LE(relative_error(packed_grads[i], separate_grads[i]), tolerance::kFp32Model)
        << decoder_->params()[i].spec.name;
  }
}

TEST_F(DecoderTest, CountsTheBalanceHistogramOnceUnderRecomputation) {
  const at::Tensor tokens_N = random_tokens(60, 256, 9);
  std::vector<at::Tensor> counts;
  for (const bool recompute : {false, true}) {
    for (MoeLayer* moe : decoder_->moe_layers()) {
      if (moe != nullptr) moe->enable_balancing(100);
    }
    ForwardOptions options;
    options.training = true;
    options.recompute = recompute;
    decoder_->forward(tokens_N, SequenceLayout::from_lengths({60}), nullptr, options).sum().backward();
    MoeLayer* moe = decoder_->moe_layers()[1];
    EXPECT_EQ(moe->balancer()->num_tokens(), 60);
    counts.push_back(moe->balancer()->counts_EQ().clone());
  }
  EXPECT_TRUE(at::equal(counts[0], counts[1]));
}

TEST_F(DecoderTest, RowsPastTheLastSequenceAreZeroAndTheirTokensNeverRead) {
  const at::Tensor tokens_N = random_tokens(20, 256, 4);
  tokens_N.slice(0, 15).fill_(-1);
  const at::Tensor padded_ND = decoder_->forward(tokens_N, SequenceLayout::from_lengths({15}), nullptr, {});
  EXPECT_EQ(padded_ND.slice(0, 15).abs().max().item<float>(), 0.0f);
  const at::Tensor alone_ND =
      decoder_->forward(tokens_N.slice(0, 0, 15), SequenceLayout::from_lengths({15}), nullptr, {});
  EXPECT_LE(relative_error(padded_ND.slice(0, 0, 15), alone_ND), tolerance::kFp32Chain);
}

TEST_F(DecoderTest, HandlesNoTokensAndRefusesBadOnes) {
  const at::Tensor empty = random_tokens(0, 256, 4);
  EXPECT_EQ(decoder_->forward(empty, SequenceLayout::from_lengths({}), nullptr, {}).size(0), 0);
  EXPECT_THROW(decoder_->forward(empty, SequenceLayout::from_lengths({3}), nullptr, {}), UsageError);
  const at::Tensor outside = at::full({3}, 256, at::kLong);
  EXPECT_THROW(decoder_->forward(outside, SequenceLayout::from_lengths({3}), nullptr, {}), UsageError);
}

TEST_F(DecoderTest, RecordsEveryLayer) {
  ForwardRecord record;
  ForwardOptions options;
  options.record = &record;
  decoder_->forward(random_tokens(30, 256, 4), SequenceLayout::from_lengths({30}), nullptr, options);
  ASSERT_EQ(record.layers.size(), 5u);
  for (int64_t layer = 0; layer < 5; ++layer) {
    const LayerRecord& got = record.layers[layer];
    EXPECT_EQ(got.load_E.defined(), layer > 0);
    EXPECT_EQ(got.decay_saturated.defined(), layer < 3);
    EXPECT_EQ(got.attention_depth_weight_S.numel(), layer == 0 ? 1 : (layer + 1) / 2 + 1);
    EXPECT_EQ(got.mlp_depth_weight_S.numel(), layer / 2 + 2);
  }
  EXPECT_EQ(record.output_depth_weight_S.numel(), 4);
}

TEST_F(DecoderTest, Bf16ForwardIsCloseToFp32) {
  const WholeRun whole = run_whole(*decoder_, random_tokens(kTokens, 256, 5));
  const at::NoGradGuard no_grad;
  decoder_->set_compute_dtype(at::kBFloat16);
  ForwardOptions options;
  options.forced_expert_ids = &whole.expert_ids;
  const at::Tensor hidden_ND =
      decoder_->forward(whole.tokens_N, SequenceLayout::from_lengths({kTokens}), nullptr, options);
  EXPECT_EQ(hidden_ND.scalar_type(), at::kBFloat16);
  const at::Tensor cosine_N = at::cosine_similarity(decoder_->logits(hidden_ND), whole.logits_NV, 1);
  EXPECT_GE(cosine_N.median().item<float>(), 1.0 - tolerance::kBf16ModelCosine);
}

TEST_F(DecoderTest, Fp32MastersUnderBf16ComputeGetFp32Gradients) {
  decoder_->set_compute_dtype(at::kBFloat16);
  next_token_loss(*decoder_, random_tokens(40, 256, 2), {40}).backward();
  for (const Param& param : decoder_->params()) {
    if (!param.tensor->grad().defined()) continue;
    EXPECT_EQ(param.tensor->grad().scalar_type(), at::kFloat) << param.spec.name;
    EXPECT_TRUE(param.tensor->grad().isfinite().all().item<bool>()) << param.spec.name;
  }
}

TEST_F(DecoderTest, FreshModelReadsTheMeanOfItsSources) {
  Decoder fresh(tiny_config());
  fresh.initialize(1, at::kFloat, at::kCPU, false);
  ForwardRecord record;
  ForwardOptions options;
  options.record = &record;
  fresh.forward(random_tokens(10, 256, 4), SequenceLayout::from_lengths({10}), nullptr, options);
  EXPECT_LE(relative_error(record.output_depth_weight_S, at::full({4}, 0.25)), tolerance::kFp32);
}

}  // namespace
}  // namespace furlong
