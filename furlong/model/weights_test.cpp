#include "furlong/model/weights.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <functional>

#include "furlong/base/file.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/model/test_checkpoint.h"
#include "furlong/model/test_model.h"

namespace furlong {
namespace {

using ::testing::HasSubstr;

class WeightsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              (std::string("furlong_weights_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string refusal() const {
    try {
      load_decoder(folder_, at::kFloat, at::kCPU);
    } catch (const FormatError& error) {
      return error.what();
    }
    return "";
  }
  void edit(const std::function<void(NamedTensors&)>& change) const { edit_tensors(folder_, change); }

  std::filesystem::path folder_;
};

TEST_F(WeightsTest, SaveAndLoadKeepEveryBit) {
  const std::vector<std::vector<std::string>> cases = {
      {}, {"attnres_block_size=0", "activation=swiglu", "kda.full_rank_gate=false"}};
  for (const auto& assignments : cases) {
    const auto saved = tiny_decoder(assignments);
    save_weights(*saved, folder_, at::kFloat);
    const auto loaded = load_decoder(folder_, at::kFloat, at::kCPU);
    ASSERT_EQ(loaded->params().size(), saved->params().size());
    for (size_t i = 0; i < saved->params().size(); ++i) {
      EXPECT_TRUE(at::equal(*loaded->params()[i].tensor, *saved->params()[i].tensor)) << saved->params()[i].spec.name;
    }
  }
}

TEST_F(WeightsTest, WritesPublishedNames) {
  save_weights(*tiny_decoder(), folder_, at::kBFloat16);
  const CheckpointReader reader(folder_);
  const std::string layers = "language_model.model.layers.";
  EXPECT_EQ(reader.shape(layers + "1.block_sparse_moe.experts.7.w1.weight"), (std::vector<int64_t>{32, 32}));
  EXPECT_EQ(reader.dtype(layers + "1.block_sparse_moe.experts.7.w1.weight"), "BF16");
  EXPECT_EQ(reader.shape(layers + "0.self_attn.q_conv1d.weight"), (std::vector<int64_t>{64, 1, 4}));
  EXPECT_EQ(reader.dtype(layers + "0.self_attn.q_conv1d.weight"), "F32");
  EXPECT_EQ(reader.dtype(layers + "0.self_attn.A_log"), "F32");
  for (const char* name : {"0.mlp.gate_proj.weight", "0.self_attention_res_proj.weight", "3.self_attn.kv_b_proj.weight",
                           "1.block_sparse_moe.gate.e_score_correction_bias", "0.self_attn.dt_bias",
                           "2.block_sparse_moe.routed_expert_norm.weight", "4.self_attn.g_proj.weight"}) {
    EXPECT_TRUE(reader.contains(layers + name)) << name;
  }
  for (const char* name : {"language_model.lm_head.weight", "language_model.model.embed_tokens.weight",
                           "language_model.model.norm.weight", "language_model.model.output_attn_res_proj.weight"}) {
    EXPECT_TRUE(reader.contains(name)) << name;
  }
}

TEST_F(WeightsTest, RefusesMissingUnknownAndMisshapenTensorsByName) {
  const auto decoder = tiny_decoder();
  save_weights(*decoder, folder_, at::kFloat);
  edit([](NamedTensors& tensors) { tensors.erase(tensors.begin()); });
  EXPECT_THAT(refusal(), HasSubstr("is missing"));

  save_weights(*decoder, folder_, at::kFloat);
  edit([](NamedTensors& tensors) { tensors.emplace_back("language_model.model.layers.9.extra", at::ones({1})); });
  EXPECT_THAT(refusal(), HasSubstr("'language_model.model.layers.9.extra' has no place"));

  save_weights(*decoder, folder_, at::kFloat);
  edit([](NamedTensors& tensors) {
    for (auto& [name, tensor] : tensors) {
      if (name == "language_model.model.norm.weight") tensor = at::ones({63});
    }
  });
  EXPECT_THAT(refusal(), HasSubstr("'language_model.model.norm.weight' is [63], config.json asks for [64]"));
}

TEST_F(WeightsTest, ChecksAConfigAgainstTheHeadersAlone) {
  save_weights(*tiny_decoder(), folder_, at::kFloat);
  EXPECT_NO_THROW(check_weights(folder_));
  OrderedJson config = read_json(folder_ / "config.json");
  config["text_config"]["vocab_size"] = tiny_config().vocab_size + 1;
  write_json_atomic(folder_ / "config.json", config);
  try {
    check_weights(folder_);
    FAIL() << "accepted";
  } catch (const FormatError& error) {
    EXPECT_THAT(error.what(), HasSubstr("embed_tokens.weight' is"));
    EXPECT_EQ(error.exit_code(), 2);
  }
}

TEST(Initialize, DependsOnSeedAndNameAlone) {
  Decoder one(tiny_config()), other(tiny_config({"num_layers=4", "full_attention_layers=[4]", "attnres_block_size=0"}));
  one.initialize(3, at::kFloat, at::kCPU, true);
  other.initialize(3, at::kFloat, at::kCPU, true);
  int64_t compared = 0;
  for (const Param& a : one.params()) {
    for (const Param& b : other.params()) {
      if (a.spec.name != b.spec.name) continue;
      EXPECT_TRUE(at::equal(*a.tensor, *b.tensor)) << a.spec.name;
      ++compared;
    }
  }
  EXPECT_GT(compared, 40);
}

TEST(Initialize, IsTheSameForAnyNumberOfThreads) {
  const ParamSpec spec{.name = "x", .shape = {257, 129}, .init = Init::truncated_normal(0.02)};
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const at::Tensor alone = draw_initial(spec, 5);
  omp_set_num_threads(4);
  const at::Tensor together = draw_initial(spec, 5);
  omp_set_num_threads(threads);
  EXPECT_TRUE(at::equal(alone, together));
  EXPECT_LE(alone.abs().max().item<float>(), 0.06f);
  EXPECT_NEAR(alone.std().item<float>(), 0.02 * 0.9866, 3e-4);  // 0.9866: deviation of a normal cut at 3
}

TEST(Initialize, PseudoQueriesAreZero) {
  Decoder decoder(tiny_config());
  decoder.initialize(3, at::kFloat, at::kCPU, true);
  int64_t found = 0;
  for (const Param& param : decoder.params()) {
    if (param.spec.name.find("_res_proj") == std::string::npos) continue;
    EXPECT_EQ(param.tensor->abs().max().item<float>(), 0.0f) << param.spec.name;
    ++found;
  }
  EXPECT_EQ(found, 2 * 5 + 1);
}

}  // namespace
}  // namespace furlong
