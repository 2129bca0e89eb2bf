// User cases of loading, names, configs and dtypes (T12 to T23, T36, T41), as tests.

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <limits>

#include "furlong/base/file.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/model/checkpoint_map.h"
#include "furlong/model/count.h"
#include "furlong/model/test_checkpoint.h"
#include "furlong/model/test_model.h"
#include "furlong/model/weights.h"
#include "furlong/ops/moe/layer.h"
#include "furlong/ops/mxfp4/mxfp4.h"

namespace furlong {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

const std::string kLayers = "language_model.model.layers.";

class PublishedCheckpoint : public ::testing::Test {
 protected:
  PublishedCheckpoint()
      : folder_(fs::path(testing::TempDir()) / ("furlong_user_cases_" + std::to_string(getpid()))),
        again_(folder_.string() + "_again") {
    save_weights(*tiny_decoder(), folder_, at::kBFloat16);
  }
  ~PublishedCheckpoint() override {
    fs::remove_all(folder_);
    fs::remove_all(again_);
  }

  std::unique_ptr<Decoder> load(at::ScalarType dtype = at::kFloat) const {
    return load_decoder(folder_, dtype, at::kCPU);
  }
  std::string refusal() const {
    try {
      load();
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
  void edit(const std::function<void(NamedTensors&)>& change) const { edit_tensors(folder_, change); }
  void edit_tensor(const std::string& wanted, const std::function<void(std::string&, at::Tensor&)>& change) const {
    edit([&](NamedTensors& tensors) {
      for (auto& [name, tensor] : tensors) {
        if (name.ends_with(wanted)) change(name, tensor);
      }
    });
  }
  void edit_config(const std::function<void(OrderedJson& text)>& change) const {
    OrderedJson config = OrderedJson::parse(read_file(folder_ / "config.json"));
    change(config["text_config"]);
    write_json_atomic(folder_ / "config.json", config);
  }
  /// Experts as MXFP4, in two tensors each.
  void pack_experts() const {
    edit([](NamedTensors& tensors) {
      NamedTensors packed;
      for (auto& [name, tensor] : tensors) {
        if (name.find(".experts.") == std::string::npos) {
          packed.emplace_back(name, tensor);
          continue;
        }
        const std::string stem = name.substr(0, name.size() - std::string(".weight").size());
        const auto [codes, scale] = mxfp4_quantize(tensor);
        packed.emplace_back(stem + ".weight_packed", codes);
        packed.emplace_back(stem + ".weight_scale", scale);
      }
      tensors = std::move(packed);
    });
  }
  void expect_same_files() const {
    export_weights(*load(), folder_, again_);
    int64_t files = 0;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      EXPECT_EQ(read_file(entry.path()), read_file(again_ / entry.path().filename())) << entry.path();
      ++files;
    }
    EXPECT_GE(files, 2);
  }

  fs::path folder_, again_;
};

// T12: A_log is stored with more entries than heads; the rest is checked, and written back.
TEST_F(PublishedCheckpoint, PaddedALogIsCutCheckedAndRestored) {
  const int64_t heads = tiny_config().kda.heads;
  {
    const CheckpointReader reader(folder_);
    EXPECT_EQ(reader.shape(kLayers + "0.self_attn.A_log"), std::vector<int64_t>{128});
  }
  const auto decoder = load();
  for (const Param& param : decoder->params()) {
    if (is_a_log(param.spec)) {
      EXPECT_EQ(param.tensor->numel(), heads) << param.spec.name;
    }
  }
  expect_same_files();
  edit_tensor("0.self_attn.A_log", [&](std::string&, at::Tensor& tensor) { tensor[heads].fill_(0.5); });
  EXPECT_THAT(refusal(),
              HasSubstr("0.self_attn.A_log' holds 128 values for 2 heads, but what stands behind them is not"));
}

TEST_F(PublishedCheckpoint, ALogMayStandInAnyPublishedShape) {
  const int64_t heads = tiny_config().kda.heads;
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{heads}, {1, 1, heads, 1}, {heads + 5}}) {
    const int64_t numel = shape.size() == 1 ? shape[0] : heads;
    edit_tensor(".A_log", [&](std::string&, at::Tensor& tensor) {
      tensor = tensor.flatten().slice(0, 0, numel).clone().reshape(shape);
    });
    EXPECT_EQ(refusal(), "accepted") << shape.size();
    expect_same_files();
    save_weights(*tiny_decoder(), folder_, at::kBFloat16);
  }
  edit_tensor(".A_log", [&](std::string&, at::Tensor& tensor) { tensor = tensor.slice(0, 0, heads - 1).clone(); });
  EXPECT_THAT(refusal(), HasSubstr("A_log' is [1]"));
}

// T14: the router's bias is fp32 in the file and in a bf16 model, and leaves it as it came.
TEST_F(PublishedCheckpoint, Fp32TensorsStayFp32FromLoadToExport) {
  const std::string name = kLayers + "1.block_sparse_moe.gate.e_score_correction_bias";
  const at::Tensor odd = at::full({8}, 0.123456789, at::kFloat);
  edit_tensor(name, [&](std::string&, at::Tensor& tensor) { tensor = odd; });
  const auto narrow = load(at::kBFloat16);
  EXPECT_TRUE(at::equal(narrow->moe_layers()[1]->correction_bias_E(), odd));
  for (const Param& param : narrow->params()) {
    const bool wide = param.spec.dtype == DtypePolicy::kFp32;
    EXPECT_EQ(param.tensor->scalar_type(), wide ? at::kFloat : at::kBFloat16) << param.spec.name;
  }
  export_weights(*narrow, folder_, again_);
  EXPECT_EQ(read_file(folder_ / "model.safetensors"), read_file(again_ / "model.safetensors"));
}

TEST_F(PublishedCheckpoint, ExportRefusesToWidenWhatWasRounded) {
  save_weights(*tiny_decoder(), folder_, at::kFloat);
  EXPECT_THROW(export_weights(*load(at::kBFloat16), folder_, again_), UsageError);
}

// T15: an architecture key that is gone or misspelt is named.
TEST_F(PublishedCheckpoint, MissingArchitectureKeysAreNamed) {
  const std::string whole = read_file(folder_ / "config.json");
  for (const char* key : {"activation_situ_beta", "activation_situ_linear_beta", "routed_expert_hidden_size",
                          "attn_res_block_size", "latent_moe_use_norm", "mla_use_output_gate", "q_lora_rank",
                          "kv_lora_rank", "num_experts", "num_experts_per_token", "num_shared_experts", "hidden_act",
                          "routed_scaling_factor", "moe_renormalize", "first_k_dense_replace", "rms_norm_eps"}) {
    write_file_atomic(folder_ / "config.json", whole);
    edit_config([&](OrderedJson& text) { text.erase(key); });
    EXPECT_THAT(refusal(), HasSubstr(std::string("missing key '") + key + "'"));
    write_file_atomic(folder_ / "config.json", whole);
    edit_config([&](OrderedJson& text) {
      text[std::string(key) + "x"] = text[key];
      text.erase(key);
    });
    EXPECT_THAT(refusal(), HasSubstr("unknown key '" + std::string(key) + "x' (did you mean '" + key + "'?)"));
  }
  for (const char* key :
       {"gate_lower_bound", "use_full_rank_gate", "head_dim", "num_heads", "short_conv_kernel_size"}) {
    write_file_atomic(folder_ / "config.json", whole);
    edit_config([&](OrderedJson& text) { text["linear_attn_config"].erase(key); });
    EXPECT_THAT(refusal(), HasSubstr("missing key 'linear_attn_config." + std::string(key) + "'"));
  }
}

// T16: a tensor that the architecture does not use is an error.
TEST_F(PublishedCheckpoint, TheLatentNormIsNeverIgnored) {
  edit_config([](OrderedJson& text) { text["latent_moe_use_norm"] = false; });
  EXPECT_THAT(refusal(), HasSubstr("routed_expert_norm.weight' has no place in the architecture"));
}

TEST_F(PublishedCheckpoint, VisionTensorsAreCarriedThroughAndListed) {
  edit([](NamedTensors& tensors) {
    tensors.emplace_back("vision_tower.encoder.blocks.0.wo.weight", at::ones({3, 5}, at::kBFloat16));
    tensors.emplace_back("mm_projector.post_norm.weight", at::ones({7}, at::kBFloat16));
  });
  const CheckpointReader reader(folder_);
  const CheckpointMap map = map_checkpoint(*load(), reader, folder_);
  EXPECT_THAT(map.carried,
              testing::ElementsAre("mm_projector.post_norm.weight", "vision_tower.encoder.blocks.0.wo.weight"));
  expect_same_files();
}

TEST_F(PublishedCheckpoint, OlderSpellingsAreReadAndKept) {
  edit([](NamedTensors& tensors) {
    const std::vector<std::pair<std::string, std::string>> older = {
        {"_res_proj.weight", "_res.proj_weight"},
        {"_res_norm.weight", "_res.norm_weight"},
        {"block_sparse_moe.gate.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"}};
    for (auto& [name, tensor] : tensors) {
      for (const auto& [today, before] : older) {
        if (name.ends_with(today)) name.replace(name.size() - today.size(), today.size(), before);
      }
    }
  });
  EXPECT_EQ(refusal(), "accepted");
  expect_same_files();
  edit([](NamedTensors& tensors) { tensors.emplace_back(kLayers + "0.mlp_res_proj.weight", at::ones({1, 64})); });
  EXPECT_THAT(refusal(), HasSubstr("are one under two spellings"));
}

TEST_F(PublishedCheckpoint, TheLayerDecidesWhatGProjMeans) {
  const ModelConfig config = tiny_config();
  EXPECT_EQ(tensor_group(config, kLayers + "0.self_attn.g_proj.weight"), "KDA");
  EXPECT_EQ(tensor_group(config, kLayers + "3.self_attn.g_proj.weight"), "MLA");
  // The widths of the two gates differ in general; a checkpoint that swaps them is misshapen.
  edit_config([](OrderedJson& text) { text["v_head_dim"] = 8; });
  EXPECT_THAT(refusal(), HasSubstr("3.self_attn."));
}

TEST_F(PublishedCheckpoint, IntegersAreNoWeights) {
  edit_tensor("model.norm.weight", [](std::string&, at::Tensor& tensor) { tensor = tensor.to(at::kInt); });
  EXPECT_THAT(refusal(), HasSubstr("model.norm.weight' is of dtype I32"));
}

TEST_F(PublishedCheckpoint, TheReportHasAChecksumForEachGroup) {
  const auto groups_of = [&] {
    std::map<std::string, GroupReport> groups;
    for (GroupReport& group : describe_checkpoint(tiny_config(), CheckpointReader(folder_), true)) {
      groups[group.name] = group;
    }
    return groups;
  };
  const auto before = groups_of();
  for (const char* name : {"KDA", "MLA", "router", "routed experts", "shared experts", "latent MoE", "dense MLP",
                           "attention residuals", "norms", "embedding", "output head"}) {
    EXPECT_EQ(before.count(name), 1u) << name;
  }
  EXPECT_EQ(before.count("other"), 0u);
  edit_tensor("1.block_sparse_moe.gate.weight", [](std::string&, at::Tensor& tensor) { tensor[0][0] += 1; });
  for (const auto& [name, group] : groups_of()) {
    EXPECT_EQ(group.checksum == before.at(name).checksum, name != "router") << name;
  }
}

// T17: what says that experts are packed must say in which order.
TEST_F(PublishedCheckpoint, PackedExpertsNeedAFormat) {
  pack_experts();
  const auto fault = [&] {
    try {
      check_weights(folder_);
    } catch (const FormatError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(fault(), HasSubstr("key 'quantization_config.format' of config.json is missing"));
  edit_config([](OrderedJson& text) { text["quantization_config"] = {{"format", "mxfp4-other"}}; });
  EXPECT_THAT(fault(), HasSubstr("is \"mxfp4-other\", need mxfp4-pack-quantized"));
  edit_config([](OrderedJson& text) { text["quantization_config"] = {{"format", "mxfp4-pack-quantized"}}; });
  EXPECT_EQ(fault(), "accepted");
  edit_tensor("1.block_sparse_moe.experts.0.w1.weight_scale",
              [](std::string&, at::Tensor& tensor) { tensor = tensor.slice(0, 1).clone(); });
  EXPECT_THAT(fault(), HasSubstr("experts.0.w1.weight_scale' is U8"));
}

TEST_F(PublishedCheckpoint, PackedExpertsAreExactAndPackedAgain) {
  pack_experts();
  edit_config([](OrderedJson& text) { text["quantization_config"] = {{"format", "mxfp4-pack-quantized"}}; });
  const std::string stem = kLayers + "1.block_sparse_moe.experts.3.w2";
  const auto expert = [&](const Decoder& decoder) {
    for (const Param& param : decoder.params()) {
      if (param.spec.name == "model.layers.1.block_sparse_moe.experts.{}.w2.weight") return param.tensor->select(0, 3);
    }
    return at::Tensor();
  };
  const auto decoder = load();
  const CheckpointReader reader(folder_);
  const at::Tensor scale = reader.tensor(stem + ".weight_scale");
  EXPECT_TRUE(at::equal(expert(*decoder), mxfp4_dequantize(reader.tensor(stem + ".weight_packed"), scale, at::kFloat)));
  expect_same_files();
  // Twice the value is one more in the exponent: trained experts are packed anew, all others keep their bytes.
  expert(*decoder).mul_(2);
  export_weights(*decoder, folder_, again_);
  const CheckpointReader changed(again_);
  EXPECT_TRUE(at::equal(changed.tensor(stem + ".weight_scale"), scale + 1));
  EXPECT_TRUE(at::equal(changed.tensor(stem + ".weight_packed"), reader.tensor(stem + ".weight_packed")));
  edit_tensor("1.block_sparse_moe.experts.3.w2.weight_scale",
              [](std::string&, at::Tensor& tensor) { tensor[5][0].fill_(255); });
  EXPECT_THAT(refusal(), HasSubstr(stem + ".weight_scale'"));
}

Json published(const std::string& name, const std::function<void(Json& text)>& change) {
  Json config = Json::parse(
      ModelConfig::load(std::string(FURLONG_SOURCE_DIR) + "/configs/model/" + name + ".toml").to_hugging_face().dump());
  change(config.contains("text_config") ? config["text_config"] : config);
  return config;
}

std::string config_refusal(const Json& config) {
  try {
    ModelConfig::from_hugging_face(config, "config.json");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

// T13: no limit on the number of experts is built in.
TEST(PublishedConfig, TakesAsManyExpertsAsPublished) {
  const auto config = published("kimi-k3", [](Json& text) { EXPECT_EQ(text["num_experts"], 896); });
  EXPECT_EQ(ModelConfig::from_hugging_face(config, "config.json").moe.num_experts, 896);
}

// T23: negative, zero and absurd counts are refused with the file's own key.
TEST(PublishedConfig, RefusesAbsurdCountsByKey) {
  for (const char* name : {"kimi-k3", "kimi-linear-48b"}) {
    for (const char* key : {"num_hidden_layers", "num_attention_heads", "num_experts", "num_experts_per_token",
                            "hidden_size", "vocab_size", "moe_intermediate_size", "kv_lora_rank", "v_head_dim"}) {
      for (const int64_t value : {int64_t{-1}, int64_t{0}, int64_t{1} << 40, std::numeric_limits<int64_t>::max()}) {
        if (value == 0 && std::string(key) == "num_experts") continue;  // no experts: a dense model
        const Json config = published(name, [&](Json& text) {
          text[key] = value;
          if (std::string(key) == "num_attention_heads") text["num_key_value_heads"] = value;
        });
        EXPECT_THAT(config_refusal(config), testing::ContainsRegex(std::string("key '[a-z_.]*") + key + "'"))
            << name << " " << value;
      }
    }
    for (const char* key : {"num_heads", "head_dim"}) {
      for (const int64_t value : {int64_t{-3}, int64_t{0}, int64_t{1} << 33}) {
        const Json config = published(name, [&](Json& text) { text["linear_attn_config"][key] = value; });
        EXPECT_THAT(config_refusal(config), HasSubstr("key 'linear_attn_config." + std::string(key) + "'")) << value;
      }
    }
  }
}

// T36: this architecture has no rotary positions; a config that asks for them is refused by the key that does.
TEST(PublishedConfig, RefusesRotaryPositionsByKey) {
  for (const char* name : {"kimi-k3", "kimi-linear-48b"}) {
    const auto with = [&](const char* key, const Json& value) {
      return config_refusal(published(name, [&](Json& text) { text[key] = value; }));
    };
    EXPECT_THAT(with("mla_use_nope", false), HasSubstr("key 'mla_use_nope'"));
    EXPECT_THAT(with("rope_scaling", {{"type", "yarn"}, {"factor", 4}}), HasSubstr("key 'rope_scaling'"));
    EXPECT_THAT(with("partial_rotary_factor", 0.5), HasSubstr("key 'partial_rotary_factor'"));
    EXPECT_EQ(with("rope_scaling", nullptr), "accepted");
    EXPECT_EQ(with("rope_theta", 10000.0), "accepted");
  }
}

// T41: the first layer is dense, the others have experts; caches count the layers of their own kind.
TEST(PublishedConfig, CountsLayersOfEachKind) {
  const ModelConfig config = ModelConfig::load(std::string(FURLONG_SOURCE_DIR) + "/configs/model/kimi-k3.toml");
  int64_t dense = 0, experts = 0;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) ++(config.is_moe(layer) ? experts : dense);
  EXPECT_EQ(dense, 1);
  EXPECT_EQ(experts, 92);
  const ModelCount sizes = count(config);
  EXPECT_EQ(sizes.cache_bytes_per_token, 24 * (512 + 64) * 2);
  EXPECT_EQ(sizes.state_bytes, 69.0 * 96 * 128 * 128 * 4);
  EXPECT_EQ(sizes.routed_expert_parameters, 92.0 * 896 * 3 * 3072 * 3584);
}

}  // namespace
}  // namespace furlong
