#include "furlong/eval/loss.h"

#include <ATen/ops/log_softmax.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "tests/support/tiny_run.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using testing_support::fresh_folder;

class EvalLoss : public testing::Test {
 protected:
  EvalLoss() : folder_(fresh_folder("eval_loss")) {
    testing_support::write_tiny_shards(folder_, 6, 40);
    config_ = testing_support::tiny_config(folder_);
    decoder_ = std::make_unique<Decoder>(config_.model);
    decoder_->initialize(9, at::kFloat, at::kCPU, false);
  }
  LossReport run(const LossOptions& options) { return evaluate_loss(*decoder_, ShardSet(folder_), options); }

  std::filesystem::path folder_;
  TrainConfig config_;
  std::unique_ptr<Decoder> decoder_;
};

TEST_F(EvalLoss, CountsEveryTokenAndByteOfEachDocument) {
  const LossReport report = run({});
  const ShardSet shards(folder_);
  EXPECT_EQ(report.tokens, shards.num_tokens());
  EXPECT_EQ(report.bytes, shards.num_bytes());
  EXPECT_NEAR(report.bits_per_byte(), report.nats / std::numbers::ln2 / static_cast<double>(shards.num_bytes()), 1e-12);
  EXPECT_NEAR(report.nats_per_token(), std::log(256.0), 0.2);
}

TEST_F(EvalLoss, EqualsTheLogProbabilitiesOfTheDocumentAlone) {
  const LossReport report = run({});
  const ShardSet shards(folder_);
  const int64_t length = shards.document_length(2);
  at::Tensor tokens_N = at::zeros({length}, at::kLong);
  shards.copy_tokens(2, 0, length, tokens_N.mutable_data_ptr<int64_t>());
  const at::Tensor hidden = decoder_->forward(tokens_N, SequenceLayout::from_lengths({length}), nullptr, {});
  const at::Tensor log_p = decoder_->logits(hidden).log_softmax(-1);
  double nats = std::log(256.0);
  for (int64_t t = 1; t < length; ++t) nats -= log_p[t - 1][tokens_N[t].item<int64_t>()].item<double>();
  EXPECT_NEAR(report.documents[2].nats, nats, tolerance::kFp32Chain * nats);
}

TEST_F(EvalLoss, ChunksWithCarriedStateChangeNothing) {
  const double whole = run({}).nats;
  for (const int64_t chunk : {1, 7, 16}) EXPECT_NEAR(run({.chunk = chunk}).nats, whole, tolerance::kFp32Chain * whole);
}

TEST_F(EvalLoss, AWindowForgetsWhatStandsBefore) {
  const LossReport whole = run({}), windowed = run({.window = 8});
  EXPECT_EQ(windowed.tokens, whole.tokens);
  EXPECT_NE(windowed.nats, whole.nats);
  EXPECT_EQ(windowed.by_position.to_json()["first"].size(), 4u);  // positions 0, 1, 2-3, 4-7
  EXPECT_NEAR(run({.window = 1000}).nats, whole.nats, tolerance::kFp32Chain * whole.nats);
}

}  // namespace
}  // namespace furlong
