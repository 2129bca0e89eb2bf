#pragma once

// The architecture as a plain struct. Reads Furlong TOML (configs/model/) and Hugging Face config.json (Kimi-Linear
// flat, Kimi-K3 nested); unknown, missing or absurd architecture keys are ConfigErrors naming the key.

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "furlong/base/config.h"

namespace furlong {

constexpr double kMaxWidth = 1 << 20;

/// Kimi delta attention. [kda] in TOML.
struct KdaOptions {
  int64_t heads = 0;
  int64_t head_size = 0;
  int64_t conv_kernel = 4;
  double gate_lower_bound = 0.0;  // 0: softplus gate
  bool full_rank_gate = false;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("heads", heads, {.doc = "heads", .min = 0, .max = 4096});
    visit("head_size", head_size, {.doc = "key and value size of a head", .min = 0, .max = 1024});
    visit("conv_kernel", conv_kernel, {.doc = "taps of the short convolution", .min = 2, .max = 16});
    visit("gate_lower_bound", gate_lower_bound,
          {.doc = "bounded gate: lowest log decay of a token; 0: softplus gate", .min = -5, .max = 0});
    visit("full_rank_gate", full_rank_gate, {.doc = "output gate as one full matrix instead of rank head_size"});
  }
};

/// Multi-head latent attention. [mla] in TOML.
struct MlaOptions {
  int64_t heads = 0;
  int64_t q_lora_rank = 0;  // 0: a single q_proj
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;  // key part shared by the heads, never rotated
  int64_t v_head_dim = 0;
  bool output_gate = false;
  bool output_fp32 = true;
  double latent_norm_eps = 1e-6;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("heads", heads, {.doc = "heads", .min = 0, .max = 4096});
    visit("q_lora_rank", q_lora_rank, {.doc = "low rank of the query; 0: full", .min = 0, .max = kMaxWidth});
    visit("kv_lora_rank", kv_lora_rank, {.doc = "width of the cached latent", .min = 0, .max = kMaxWidth});
    visit("qk_nope_head_dim", qk_nope_head_dim, {.doc = "key size of a head's own part", .min = 0, .max = 4096});
    visit("qk_rope_head_dim", qk_rope_head_dim, {.doc = "size of the shared key part", .min = 0, .max = 4096});
    visit("v_head_dim", v_head_dim, {.doc = "value size of a head", .min = 0, .max = 4096});
    visit("output_gate", output_gate, {.doc = "sigmoid gate before the output projection"});
    visit("output_fp32", output_fp32, {.doc = "attention output kept in fp32 up to the gate"});
    visit("latent_norm_eps", latent_norm_eps, {.doc = "eps of the two latent norms", .min = 1e-12, .max = 1e-2});
  }
};

/// Mixture of experts. [moe] in TOML; no experts: every layer is dense.
struct MoeOptions {
  int64_t num_experts = 0;
  int64_t experts_per_token = 0;
  int64_t shared_experts = 0;
  int64_t expert_size = 0;
  int64_t latent_size = 0;  // 0: experts work on the hidden size
  bool latent_norm = false;
  int64_t first_dense_layers = 1;
  int64_t layer_freq = 1;
  int64_t expert_groups = 1;
  int64_t expert_groups_kept = 1;
  bool renormalize = true;
  double routed_scale = 1.0;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("num_experts", num_experts, {.doc = "routed experts of a layer", .min = 0, .max = 65536});
    visit("experts_per_token", experts_per_token, {.doc = "experts chosen for a token", .min = 0, .max = 1024});
    visit("shared_experts", shared_experts, {.doc = "experts that see every token", .min = 0, .max = 64});
    visit("expert_size", expert_size, {.doc = "intermediate width of an expert", .min = 0, .max = kMaxWidth});
    visit("latent_size", latent_size,
          {.doc = "width the routed experts work on; 0: hidden", .min = 0, .max = kMaxWidth});
    visit("latent_norm", latent_norm, {.doc = "norm of the combined latent before the up-projection"});
    visit("first_dense_layers", first_dense_layers, {.doc = "leading layers without experts", .min = 0, .max = 4096});
    visit("layer_freq", layer_freq, {.doc = "experts in every n-th layer", .min = 1, .max = 4096});
    visit("expert_groups", expert_groups, {.doc = "groups of experts for grouped selection", .min = 1, .max = 4096});
    visit("expert_groups_kept", expert_groups_kept, {.doc = "groups eligible for a token", .min = 1, .max = 4096});
    visit("renormalize", renormalize, {.doc = "weights of the chosen experts sum to one before scaling"});
    visit("routed_scale", routed_scale, {.doc = "factor on the weights", .min = 1e-6, .max = 1e3});
  }
};

struct ModelConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;
  std::vector<int64_t> full_attention_layers;  // 1-based, as published; every other layer is KDA
  int64_t intermediate_size = 0;               // dense feed-forward layers
  std::string activation = "swiglu";
  double situ_beta = 1.0;
  double situ_linear_beta = 0.0;   // 0: linear branch without a cap
  int64_t attnres_block_size = 0;  // decoder layers a block; 0: plain residuals
  double norm_eps = 1e-5;
  double init_std = 0.02;
  bool tie_embeddings = false;
  int64_t max_context = 1048576;
  KdaOptions kda;
  MlaOptions mla;
  MoeOptions moe;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("vocab_size", vocab_size, {.doc = "entries of the vocabulary", .min = 2, .max = 1 << 24, .required = true});
    visit("hidden_size", hidden_size,
          {.doc = "width of the residual stream", .min = 1, .max = kMaxWidth, .required = true});
    visit("num_layers", num_layers, {.doc = "decoder layers", .min = 1, .max = 4096, .required = true});
    visit("full_attention_layers", full_attention_layers,
          {.doc = "layers with MLA, counted from 1; the others are KDA", .min = 1, .max = 4096, .required = true});
    visit("intermediate_size", intermediate_size, {.doc = "width of the dense MLP", .min = 0, .max = kMaxWidth});
    visit("activation", activation, {.doc = "gated activation of every MLP", .one_of = {"swiglu", "situ"}});
    visit("situ_beta", situ_beta, {.doc = "cap of the gate branch", .min = 1e-3, .max = 1e6});
    visit("situ_linear_beta", situ_linear_beta, {.doc = "cap of the linear branch; 0: none", .min = 0, .max = 1e6});
    visit("attnres_block_size", attnres_block_size,
          {.doc = "decoder layers in a block of attention residuals; 0: plain residuals", .min = 0, .max = 4096});
    visit("norm_eps", norm_eps, {.doc = "eps of the norms", .min = 1e-12, .max = 1e-2});
    visit("init_std", init_std, {.doc = "standard deviation of initial weights", .min = 0, .max = 10});
    visit("tie_embeddings", tie_embeddings, {.doc = "output projection = embedding"});
    visit("max_context", max_context, {.doc = "longest context in tokens", .min = 1, .max = 1e9});
    visit("kda", kda, {.doc = "Kimi delta attention"});
    visit("mla", mla, {.doc = "multi-head latent attention"});
    visit("moe", moe, {.doc = "mixture of experts"});
  }

  bool is_full_attention(int64_t layer) const;  // 0-based layer
  bool is_moe(int64_t layer) const;
  bool has_kda() const { return num_full_attention() < num_layers; }
  int64_t num_full_attention() const { return static_cast<int64_t>(full_attention_layers.size()); }
  /// True when a mechanism is on that only the Kimi-K3 form of config.json can say.
  bool has_k3_mechanism() const;
  /// Of everything that decides parameters and results; equal for configs that can share states.
  uint64_t fingerprint() const;

  /// Cross-checks that ranges of single keys cannot say. ConfigError with `where` in front; `names` gives the keys of
  /// this struct another file's spelling.
  void validate(const std::string& where, const std::map<std::string, std::string>& names = {}) const;

  /// Puts keys of mechanisms that are off back to their defaults, so that switching one off (`--set moe.num_experts=0`)
  /// needs one key and gives one config.
  void drop_unused();

  /// A Furlong TOML file, a Hugging Face config.json, or a folder holding config.json.
  static ModelConfig load(const std::filesystem::path& path);
  static ModelConfig from_document(const ConfigDocument& document);
  /// config.json of either family; implemented in hugging_face.cpp.
  static ModelConfig from_hugging_face(const Json& config, const std::string& where);
  /// config.json of the published form: nested Kimi-K3 when any K3-only mechanism is on, else flat Kimi-Linear.
  OrderedJson to_hugging_face() const;
};

}  // namespace furlong
