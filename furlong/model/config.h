#pragma once

// The architecture as a plain struct. Reads Furlong TOML (configs/model/) and Hugging Face config.json (Kimi-Linear
// flat, Kimi-K3 nested); unknown, missing or absurd architecture keys are ConfigErrors naming the key.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "furlong/base/config.h"

namespace furlong {

struct ModelConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;
  std::vector<int64_t> full_attention_layers;  // 1-based, as published; every other layer is KDA
  double norm_eps = 1e-5;
  double init_std = 0.02;
  bool tie_embeddings = false;
  int64_t max_context = 1048576;

  // KDA
  int64_t kda_heads = 0;
  int64_t kda_head_size = 0;
  int64_t conv_kernel = 4;
  std::optional<double> gate_lower_bound;  // unset: softplus gate
  bool kda_full_rank_gate = false;

  // MLA
  int64_t mla_heads = 0;
  int64_t q_lora_rank = 0;  // 0: single q_proj
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  bool mla_output_gate = false;
  bool mla_output_fp32 = true;
  double latent_norm_eps = 1e-6;

  // residuals
  int64_t attnres_block_size = 0;  // decoder layers a block; 0: plain residuals

  // feed-forward
  int64_t intermediate_size = 0;  // dense layers
  int64_t first_dense_layers = 1;
  int64_t moe_layer_freq = 1;
  int64_t num_experts = 0;  // 0: every layer is dense
  int64_t num_experts_per_token = 0;
  int64_t num_shared_experts = 0;
  int64_t expert_size = 0;
  int64_t latent_size = 0;  // 0: no latent MoE
  bool latent_norm = false;
  int64_t num_expert_groups = 1;
  int64_t expert_groups_kept = 1;
  bool renormalize = true;
  double routed_scale = 1.0;
  std::string activation = "swiglu";  // "situ" or "swiglu"
  double situ_beta = 1.0;
  std::optional<double> situ_linear_beta;

  bool is_full_attention(int64_t layer) const;  // 0-based layer
  bool is_moe(int64_t layer) const;
  bool has_kda() const;

  template <typename Visitor>
  void fields(Visitor& visit);  // in config_fields.h
  /// Cross-checks that ranges of single keys cannot say. ConfigError with `where` in front.
  void validate(const std::string& where) const;

  /// A Furlong TOML file, a Hugging Face config.json, or a folder holding config.json.
  static ModelConfig load(const std::filesystem::path& path);
  static ModelConfig from_document(const ConfigDocument& document);
  static ModelConfig from_hugging_face(const Json& config, const std::string& where);
  /// config.json of the published form: nested Kimi-K3 when any K3-only mechanism is on, else flat Kimi-Linear.
  OrderedJson to_hugging_face() const;
};

}  // namespace furlong
