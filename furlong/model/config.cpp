#include "furlong/model/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace furlong {

bool ModelConfig::is_full_attention(int64_t layer) const {
  return std::find(full_attention_layers.begin(), full_attention_layers.end(), layer + 1) !=
         full_attention_layers.end();
}

bool ModelConfig::is_moe(int64_t layer) const {
  return moe.num_experts > 0 && layer >= moe.first_dense_layers && layer % moe.layer_freq == 0;
}

bool ModelConfig::has_k3_mechanism() const {
  return attnres_block_size > 0 || activation == "situ" || kda.gate_lower_bound < 0 || kda.full_rank_gate ||
         mla.output_gate || moe.latent_size > 0;
}

uint64_t ModelConfig::fingerprint() const {
  ModelConfig architecture = *this;
  architecture.init_std = 0;
  architecture.max_context = 1;
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, 64 bits
  for (const char byte : config_to_json(architecture).dump()) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  }
  return hash;
}

namespace {

/// Refuses with "where: key 'k' ..." when the condition does not hold.
struct Checker {
  const std::string& where;
  const std::map<std::string, std::string>& names;

  void need(bool holds, const char* key, const std::string& why) const {
    if (holds) return;
    const auto named = names.find(key);
    throw ConfigError(fmt::format("{}: key '{}' {}", where, named == names.end() ? key : named->second, why));
  }
  void positive(int64_t value, const char* key, const char* user) const {
    need(value > 0, key, fmt::format("is {}, must be positive: {} need it", value, user));
  }
};

void check_layers(const ModelConfig& c, const Checker& check) {
  const std::set<int64_t> unique(c.full_attention_layers.begin(), c.full_attention_layers.end());
  check.need(unique.size() == c.full_attention_layers.size(), "full_attention_layers", "names a layer twice");
  for (const int64_t layer : unique) {
    check.need(layer >= 1 && layer <= c.num_layers, "full_attention_layers",
               fmt::format("names layer {}, but layers count from 1 to {}", layer, c.num_layers));
  }
  check.need(c.attnres_block_size <= c.num_layers, "attnres_block_size",
             fmt::format("is {}, more than the {} layers", c.attnres_block_size, c.num_layers));
}

void check_mixers(const ModelConfig& c, const Checker& check) {
  if (c.has_kda()) {
    check.positive(c.kda.heads, "kda.heads", "KDA layers");
    check.positive(c.kda.head_size, "kda.head_size", "KDA layers");
  }
  if (c.num_full_attention() > 0) {
    check.positive(c.mla.heads, "mla.heads", "full-attention layers");
    check.positive(c.mla.kv_lora_rank, "mla.kv_lora_rank", "full-attention layers");
    check.positive(c.mla.qk_nope_head_dim, "mla.qk_nope_head_dim", "full-attention layers");
    check.positive(c.mla.v_head_dim, "mla.v_head_dim", "full-attention layers");
  }
}

void check_feed_forward(const ModelConfig& c, const Checker& check) {
  bool any_dense = false, any_moe = false;
  for (int64_t layer = 0; layer < c.num_layers; ++layer) (c.is_moe(layer) ? any_moe : any_dense) = true;
  if (any_dense) check.positive(c.intermediate_size, "intermediate_size", "dense layers");
  if (c.moe.num_experts == 0) return;
  check.need(any_moe, "moe.first_dense_layers", "leaves no layer for the experts");
  check.positive(c.moe.experts_per_token, "moe.experts_per_token", "experts");
  check.positive(c.moe.expert_size, "moe.expert_size", "experts");
  check.need(c.moe.experts_per_token <= c.moe.num_experts, "moe.experts_per_token",
             fmt::format("is {}, more than the {} experts", c.moe.experts_per_token, c.moe.num_experts));
  const int64_t groups = c.moe.expert_groups;
  check.need(c.moe.num_experts % groups == 0, "moe.expert_groups",
             fmt::format("is {}, must divide the {} experts", groups, c.moe.num_experts));
  check.need(c.moe.expert_groups_kept <= groups, "moe.expert_groups_kept",
             fmt::format("is {}, more than the {} groups", c.moe.expert_groups_kept, groups));
  check.need(c.moe.experts_per_token <= c.moe.num_experts / groups * c.moe.expert_groups_kept, "moe.expert_groups_kept",
             "leaves fewer experts eligible than moe.experts_per_token");
}

}  // namespace

void ModelConfig::validate(const std::string& where, const std::map<std::string, std::string>& names) const {
  const Checker check{where, names};
  check_layers(*this, check);
  check_mixers(*this, check);
  check_feed_forward(*this, check);
}

void ModelConfig::drop_unused() {
  if (activation != "situ") situ_beta = ModelConfig().situ_beta;
  if (activation != "situ") situ_linear_beta = 0.0;
  if (moe.num_experts == 0) moe = MoeOptions();
  if (moe.latent_size == 0) moe.latent_norm = false;
}

ModelConfig ModelConfig::from_document(const ConfigDocument& document) {
  auto config = read_config<ModelConfig>(document);
  config.drop_unused();
  config.validate(document.name());
  return config;
}

ModelConfig ModelConfig::load(const std::filesystem::path& path) {
  const std::filesystem::path file = std::filesystem::is_directory(path) ? path / "config.json" : path;
  if (file.extension() == ".json") return from_hugging_face(read_json(file), file.string());
  return from_document(ConfigDocument::from_file(file));
}

}  // namespace furlong
