#include "furlong/model/hf_names.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

namespace furlong {

namespace {

constexpr std::string_view kLayers = "model.layers.";
// Kimi-K3 rounds A_log up to one register row of the GPU: 96 heads stand in 128 entries.
constexpr int64_t kPaddedHeads = 128;

std::string with_index(const std::string& name, int64_t index) {
  const size_t place = name.find("{}");
  return name.substr(0, place) + std::to_string(index) + name.substr(place + 2);
}

std::vector<int64_t> published_shape(const ModelConfig& config, const ParamSpec& spec) {
  if (is_a_log(spec)) {
    const int64_t heads = spec.shape[0];
    if (!config.has_k3_mechanism()) return {1, 1, heads, 1};
    return {(heads + kPaddedHeads - 1) / kPaddedHeads * kPaddedHeads};
  }
  if (!spec.published_shape.empty()) return spec.published_shape;
  return {spec.shape.begin() + (spec.stacked() ? 1 : 0), spec.shape.end()};
}

std::string_view without_prefix(std::string_view name) {
  if (name.starts_with(kTextPrefix)) name.remove_prefix(kTextPrefix.size());
  return name;
}

/// The layer a name belongs to and what follows "model.layers.N."; -1 when it belongs to none.
std::pair<int64_t, std::string_view> split_layer(std::string_view name) {
  if (!name.starts_with(kLayers)) return {-1, name};
  name.remove_prefix(kLayers.size());
  int64_t layer = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  if (error != std::errc() || end == name.data() + name.size() || *end != '.') return {-1, name};
  return {layer, name.substr(end - name.data() + 1)};
}

}  // namespace

std::vector<std::string> published_names(const ParamSpec& spec) {
  if (!spec.stacked()) return {spec.name};
  std::vector<std::string> names;
  for (int64_t index = 0; index < spec.shape[0]; ++index) names.push_back(with_index(spec.name, index));
  return names;
}

std::vector<PublishedTensor> published_tensors(const ModelConfig& config, const Param& param) {
  const std::string prefix(config.has_k3_mechanism() ? kTextPrefix : "");
  const std::vector<int64_t> shape = published_shape(config, param.spec);
  std::vector<PublishedTensor> result;
  for (const std::string& name : published_names(param.spec)) {
    const int64_t index = param.spec.stacked() ? static_cast<int64_t>(result.size()) : -1;
    result.push_back({prefix + name, shape, index});
  }
  return result;
}

std::string canonical_name(const std::string& published) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 7> kOlder = {{
      {"self_attention_res.proj_weight", "self_attention_res_proj.weight"},
      {"self_attention_res.norm_weight", "self_attention_res_norm.weight"},
      {"mlp_res.proj_weight", "mlp_res_proj.weight"},
      {"mlp_res.norm_weight", "mlp_res_norm.weight"},
      {"output_attn_res.proj_weight", "output_attn_res_proj.weight"},
      {"output_attn_res.norm_weight", "output_attn_res_norm.weight"},
      {"block_sparse_moe.e_score_correction_bias", "block_sparse_moe.gate.e_score_correction_bias"},
  }};
  for (const auto& [older, today] : kOlder) {
    if (!published.ends_with(older)) continue;
    return published.substr(0, published.size() - older.size()) + std::string(today);
  }
  return published;
}

bool is_carried(std::string_view canonical) {
  return canonical.starts_with("vision_tower.") || canonical.starts_with("mm_projector.");
}

bool is_a_log(const ParamSpec& spec) {
  return spec.name.ends_with(".A_log");
}

bool accepts_shape(const ParamSpec& spec, const std::vector<int64_t>& shape) {
  if (is_a_log(spec)) {
    std::vector<int64_t> sizes = shape;
    std::erase(sizes, 1);
    if (sizes.empty()) return !shape.empty() && spec.shape[0] == 1;
    return sizes.size() == 1 && (shape.size() == 1 ? sizes[0] >= spec.shape[0] : sizes[0] == spec.shape[0]);
  }
  const std::vector<int64_t> own(spec.shape.begin() + (spec.stacked() ? 1 : 0), spec.shape.end());
  return shape == own || (!spec.published_shape.empty() && shape == spec.published_shape);
}

std::string tensor_group(const ModelConfig& config, std::string_view canonical) {
  const std::string_view name = without_prefix(canonical);
  if (is_carried(name)) return "vision";
  if (name.starts_with("model.embed_tokens.")) return "embedding";
  if (name.starts_with("lm_head.")) return "output head";
  const auto [layer, part] = split_layer(name);
  if (part.find("_res_") != std::string_view::npos || part.find("output_attn_res") != std::string_view::npos) {
    return "attention residuals";
  }
  if (part.starts_with("self_attn.")) return config.is_full_attention(layer) ? "MLA" : "KDA";
  if (part.starts_with("mlp.")) return "dense MLP";
  if (part.starts_with("block_sparse_moe.experts.")) return "routed experts";
  if (part.starts_with("block_sparse_moe.shared_experts.")) return "shared experts";
  if (part.starts_with("block_sparse_moe.gate.")) return "router";
  if (part.starts_with("block_sparse_moe.")) return "latent MoE";
  return part.find("norm") != std::string_view::npos ? "norms" : "other";
}

}  // namespace furlong
