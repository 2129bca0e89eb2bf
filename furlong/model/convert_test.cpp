#include "furlong/model/convert.h"

#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "furlong/base/file.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/model/compare.h"
#include "furlong/model/test_model.h"
#include "furlong/model/weights.h"

namespace furlong {
namespace {

namespace fs = std::filesystem;

class ConvertTest : public ::testing::Test {
 protected:
  ConvertTest() : root_(fs::path(testing::TempDir()) / ("furlong_convert_" + std::to_string(getpid()))) {
    fs::remove_all(root_);
    save_weights(*tiny_decoder(), root_ / "own", at::kFloat);
    write_file_atomic(root_ / "own" / "tiktoken.model", "a tokenizer");
    write_file_atomic(root_ / "own" / "train_state.json", "{}");
  }
  ~ConvertTest() override { fs::remove_all(root_); }

  static void expect_same_folders(const fs::path& a, const fs::path& b) {
    int64_t files = 0;
    for (const auto& entry : fs::directory_iterator(a)) {
      EXPECT_EQ(read_file(entry.path()), read_file(b / entry.path().filename())) << entry.path();
      ++files;
    }
    EXPECT_EQ(files, std::distance(fs::directory_iterator(b), fs::directory_iterator()));
  }

  fs::path root_;
};

TEST_F(ConvertTest, KeepsEveryWeightThroughShardsAndBack) {
  const ConvertResult sharded = convert_checkpoint(root_ / "own", root_ / "shards", {.shard_bytes = 100'000});
  EXPECT_GT(sharded.shards, 3);
  EXPECT_TRUE(fs::exists(root_ / "shards" / "model.safetensors.index.json"));
  EXPECT_TRUE(fs::exists(root_ / "shards" / "tiktoken.model"));
  EXPECT_FALSE(fs::exists(root_ / "shards" / "train_state.json"));
  EXPECT_FALSE(fs::exists(root_ / "shards.partial"));
  for (const fs::path& file : CheckpointReader(root_ / "shards").files()) EXPECT_LT(fs::file_size(file), 150'000u);
  convert_checkpoint(root_ / "shards", root_ / "back", {});
  const auto before = load_decoder(root_ / "own", at::kFloat, at::kCPU);
  const auto after = load_decoder(root_ / "back", at::kFloat, at::kCPU);
  for (size_t i = 0; i < before->params().size(); ++i) {
    EXPECT_TRUE(at::equal(*before->params()[i].tensor, *after->params()[i].tensor)) << before->params()[i].spec.name;
  }
}

TEST_F(ConvertTest, NarrowsWeightsButNotWhatMustStayFp32) {
  convert_checkpoint(root_ / "own", root_ / "narrow", {.dtype = at::kBFloat16});
  const CheckpointReader reader(root_ / "narrow");
  const std::string layer = "language_model.model.layers.1.";
  EXPECT_EQ(reader.dtype(layer + "self_attn.q_proj.weight"), "BF16");
  for (const char* name :
       {"self_attn.A_log", "self_attn.dt_bias", "self_attn.q_conv1d.weight", "self_attn.o_norm.weight",
        "block_sparse_moe.gate.weight", "block_sparse_moe.gate.e_score_correction_bias"}) {
    EXPECT_EQ(reader.dtype(layer + name), "F32") << name;
  }
  EXPECT_NE(read_file(root_ / "narrow" / "config.json").find("\"bfloat16\""), std::string::npos);
}

TEST_F(ConvertTest, AStoppedConversionGoesOn) {
  ConvertOptions options{.shard_bytes = 100'000};
  convert_checkpoint(root_ / "own", root_ / "whole", options);
  options.on_shard = [](int64_t shard, int64_t, uint64_t) {
    if (shard == 2) throw std::runtime_error("stopped");
  };
  EXPECT_THROW(convert_checkpoint(root_ / "own", root_ / "stopped", options), std::runtime_error);
  EXPECT_FALSE(fs::exists(root_ / "stopped"));
  options.on_shard = {};
  EXPECT_EQ(convert_checkpoint(root_ / "own", root_ / "stopped", options).reused_shards, 2);
  expect_same_folders(root_ / "whole", root_ / "stopped");
}

TEST_F(ConvertTest, OtherOptionsStartAnew) {
  ConvertOptions options{.shard_bytes = 100'000};
  options.on_shard = [](int64_t shard, int64_t, uint64_t) {
    if (shard == 2) throw std::runtime_error("stopped");
  };
  EXPECT_THROW(convert_checkpoint(root_ / "own", root_ / "other", options), std::runtime_error);
  EXPECT_EQ(convert_checkpoint(root_ / "own", root_ / "other", {.dtype = at::kBFloat16, .shard_bytes = 100'000})
                .reused_shards,
            0);
}

TEST_F(ConvertTest, NeverWritesOverAFolder) {
  EXPECT_THROW(convert_checkpoint(root_ / "own", root_ / "own", {}), UsageError);
  make_folders(root_ / "full");
  write_file_atomic(root_ / "full" / "x", "mine");
  EXPECT_THROW(convert_checkpoint(root_ / "own", root_ / "full", {}), UsageError);
  EXPECT_EQ(read_file(root_ / "full" / "x"), "mine");
}

TEST(Compare, ADecoderAgreesWithItself) {
  const auto decoder = tiny_decoder();
  const Comparison same =
      compare_decoders(*decoder, *decoder, random_tokens(40, decoder->config().vocab_size, 3), Numerics::kFast);
  EXPECT_EQ(same.tokens_with_flips, 0);
  EXPECT_FALSE(same.first_flip.has_value());
  EXPECT_EQ(same.logit_difference, 0);
  EXPECT_EQ(same.other_argmax, 0);
  ASSERT_EQ(same.layers.size(), 5u);
  for (const LayerComparison& layer : same.layers) EXPECT_EQ(layer.difference, 0);
}

// T66: a near tie that flips is named with its layer and margin.
TEST(Compare, NamesTheLayerAndMarginOfAFlip) {
  const auto a = tiny_decoder(), b = tiny_decoder();
  const at::NoGradGuard no_grad;
  const double nudge = 0.02;
  for (const Param& param : b->params()) {
    if (param.spec.name == "model.layers.2.block_sparse_moe.gate.e_score_correction_bias") {
      (*param.tensor)[0].add_(nudge);
    }
  }
  const Comparison pair = compare_decoders(*a, *b, random_tokens(200, a->config().vocab_size, 3), Numerics::kFast);
  ASSERT_TRUE(pair.first_flip.has_value());
  EXPECT_EQ(pair.first_flip->layer, 2);
  EXPECT_GE(pair.first_flip->margin, 0);
  EXPECT_LE(pair.first_flip->margin, nudge);
  EXPECT_EQ(pair.layers[1].flipped_tokens, 0);
  EXPECT_EQ(pair.layers[1].difference, 0);
  EXPECT_GT(pair.layers[2].flipped_tokens, 0);
  EXPECT_LE(pair.layers[2].largest_margin, nudge);
  EXPECT_GT(pair.tokens_with_flips, 0);
}

}  // namespace
}  // namespace furlong
