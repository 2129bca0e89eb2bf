#include "furlong/model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

namespace furlong {
namespace {

using ::testing::HasSubstr;

std::filesystem::path preset(const std::string& name) {
  return std::filesystem::path(FURLONG_SOURCE_DIR) / "configs" / "model" / (name + ".toml");
}

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

/// The refusal of a preset after `--set key=value`.
std::string refusal_after(const std::string& name, const std::string& assignment) {
  ConfigDocument document = ConfigDocument::from_file(preset(name));
  document.set(assignment);
  return refusal([&] { ModelConfig::from_document(document); });
}

Json hf_of(const std::string& name) {
  return Json::parse(ModelConfig::load(preset(name)).to_hugging_face().dump());
}

TEST(ModelConfig, ReadsEveryPreset) {
  for (const char* name : {"nano", "tiny", "small", "kimi-linear-48b", "kimi-k3"}) {
    EXPECT_NO_THROW(ModelConfig::load(preset(name))) << name;
  }
}

TEST(ModelConfig, KnowsTheLayersOfK3) {
  const ModelConfig config = ModelConfig::load(preset("kimi-k3"));
  EXPECT_FALSE(config.is_full_attention(0));
  EXPECT_TRUE(config.is_full_attention(3));
  EXPECT_TRUE(config.is_full_attention(91));
  EXPECT_TRUE(config.is_full_attention(92));
  EXPECT_FALSE(config.is_moe(0));
  EXPECT_TRUE(config.is_moe(1));
}

TEST(ModelConfig, RefusesUnknownAndAbsurdKeysByName) {
  EXPECT_THAT(refusal_after("tiny", "hiden_size=64"),
              HasSubstr("unknown key 'hiden_size' (did you mean 'hidden_size'?)"));
  EXPECT_THAT(refusal_after("tiny", "kda.head=2"), HasSubstr("unknown key 'kda.head'"));
  EXPECT_THAT(refusal_after("tiny", "hidden_size=0"), HasSubstr("key 'hidden_size' is 0"));
  EXPECT_THAT(refusal_after("tiny", "hidden_size=1000000000000"), HasSubstr("key 'hidden_size'"));
  EXPECT_THAT(refusal_after("tiny", "kda.heads=2.5"), HasSubstr("key 'kda.heads' must be an integer"));
  EXPECT_THAT(refusal_after("tiny", "activation=gelu"), HasSubstr("must be one of: swiglu, situ"));
  EXPECT_THAT(refusal_after("tiny", "kda.gate_lower_bound=-50"), HasSubstr("kda.gate_lower_bound"));
}

TEST(ModelConfig, RefusesContradictions) {
  EXPECT_THAT(refusal_after("tiny", "full_attention_layers=[4, 6]"), HasSubstr("names layer 6"));
  EXPECT_THAT(refusal_after("tiny", "full_attention_layers=[4, 4]"), HasSubstr("twice"));
  EXPECT_THAT(refusal_after("tiny", "moe.experts_per_token=9"), HasSubstr("more than the 8 experts"));
  EXPECT_THAT(refusal_after("tiny", "moe.expert_groups=3"), HasSubstr("must divide"));
  EXPECT_THAT(refusal_after("tiny", "kda.heads=0"), HasSubstr("KDA layers need it"));
  EXPECT_THAT(refusal_after("tiny", "mla.kv_lora_rank=0"), HasSubstr("full-attention layers need it"));
  EXPECT_THAT(refusal_after("tiny", "attnres_block_size=6"), HasSubstr("more than the 5 layers"));
  EXPECT_THAT(refusal_after("tiny", "moe.first_dense_layers=5"), HasSubstr("leaves no layer for the experts"));
  EXPECT_THAT(refusal_after("tiny", "intermediate_size=0"), HasSubstr("dense layers need it"));
}

TEST(ModelConfig, HuggingFaceFormRoundTrips) {
  for (const char* name : {"nano", "tiny", "small", "kimi-linear-48b", "kimi-k3"}) {
    const ModelConfig config = ModelConfig::load(preset(name));
    const ModelConfig back = ModelConfig::from_hugging_face(hf_of(name), name);
    EXPECT_EQ(config_to_json(back).dump(2), config_to_json(config).dump(2)) << name;
  }
}

TEST(ModelConfig, AblationsRoundTripThroughHuggingFaceForm) {
  for (const char* assignment :
       {"attnres_block_size=0", "mla.output_gate=false", "mla.q_lora_rank=0", "kda.full_rank_gate=false",
        "full_attention_layers=[]", "full_attention_layers=[1, 2, 3, 4, 5]", "mla.output_fp32=false",
        "mla.latent_norm_eps=1e-5", "moe.num_experts=0", "moe.latent_size=0", "activation=swiglu",
        "kda.gate_lower_bound=0", "situ_linear_beta=0", "moe.shared_experts=0", "tie_embeddings=true"}) {
    ConfigDocument document = ConfigDocument::from_file(preset("tiny"));
    document.set(assignment);
    const ModelConfig config = ModelConfig::from_document(document);
    const ModelConfig back = ModelConfig::from_hugging_face(Json::parse(config.to_hugging_face().dump()), assignment);
    EXPECT_EQ(config_to_json(back).dump(2), config_to_json(config).dump(2)) << assignment;
  }
}

TEST(ModelConfig, WritesThePublishedForms) {
  const Json k3 = hf_of("kimi-k3");
  EXPECT_EQ(k3["model_type"], "kimi_k3");
  EXPECT_EQ(k3["architectures"][0], "KimiK3ForConditionalGeneration");
  EXPECT_EQ(k3["text_config"]["model_type"], "kimi_linear");
  EXPECT_EQ(k3["text_config"]["num_experts_per_token"], 16);
  EXPECT_FALSE(k3["text_config"].contains("furlong"));
  const Json linear = hf_of("kimi-linear-48b");
  EXPECT_EQ(linear["model_type"], "kimi_linear");
  EXPECT_FALSE(linear.contains("text_config"));
  EXPECT_TRUE(linear["q_lora_rank"].is_null());
  EXPECT_FALSE(linear.contains("attn_res_block_size"));
}

TEST(ModelConfig, RefusesHuggingFaceFaultsByKey) {
  const auto after = [](const std::string& name, const std::function<void(Json&)>& edit) {
    Json config = hf_of(name);
    edit(config.contains("text_config") ? config["text_config"] : config);
    return refusal([&] { ModelConfig::from_hugging_face(config, "config.json"); });
  };
  const auto rename = [](const char* from, const char* to) {
    return [from, to](Json& config) {
      config[to] = config[from];
      config.erase(from);
    };
  };
  EXPECT_THAT(after("kimi-k3", rename("num_experts_per_token", "num_experts_per_tok")),
              HasSubstr("unknown key 'num_experts_per_tok' (did you mean 'num_experts_per_token'?)"));
  EXPECT_THAT(after("kimi-k3", [](Json& c) { c.erase("routed_expert_hidden_size"); }),
              HasSubstr("missing key 'routed_expert_hidden_size'"));
  EXPECT_THAT(after("kimi-k3", [](Json& c) { c["linear_attn_config"].erase("gate_lower_bound"); }),
              HasSubstr("missing key 'linear_attn_config.gate_lower_bound'"));
  EXPECT_THAT(after("kimi-linear-48b", [](Json& c) { c.erase("kv_lora_rank"); }),
              HasSubstr("missing key 'kv_lora_rank'"));
  EXPECT_THAT(after("kimi-linear-48b", [](Json& c) { c["rope_scaling"] = {{"type", "yarn"}}; }),
              HasSubstr("key 'rope_scaling'"));
  EXPECT_THAT(after("kimi-linear-48b", [](Json& c) { c["mla_use_nope"] = false; }), HasSubstr("key 'mla_use_nope'"));
  EXPECT_THAT(after("kimi-linear-48b", [](Json& c) { c["linear_attn_config"]["kda_layers"][0] = 4; }),
              HasSubstr("layer 4 is named twice"));
  EXPECT_THAT(after("kimi-linear-48b", [](Json& c) { c["model_type"] = "llama"; }), HasSubstr("key 'model_type'"));
}

TEST(ModelConfig, LoadsAFolderHoldingConfigJson) {
  const auto folder = std::filesystem::temp_directory_path() / "furlong_config_test";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json") << hf_of("tiny").dump();
  EXPECT_EQ(ModelConfig::load(folder).fingerprint(), ModelConfig::load(preset("tiny")).fingerprint());
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace furlong
