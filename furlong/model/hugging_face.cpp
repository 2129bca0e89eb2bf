// config.json of the two published families. The text part has the same keys in both; Kimi-K3 nests it below
// "text_config" of an outer object, Kimi-Linear is flat. The inner model_type is "kimi_linear" in both, so the outer
// form decides.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "furlong/model/config.h"

namespace furlong {

namespace {

struct HfLinearAttention {
  int64_t head_dim = 0, num_heads = 0, short_conv_kernel_size = 4;
  std::vector<int64_t> kda_layers, full_attn_layers;
  std::optional<bool> use_full_rank_gate;
  std::optional<double> gate_lower_bound;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("head_dim", head_dim, {.doc = "KDA head size", .min = 0, .max = 1024, .required = true});
    visit("num_heads", num_heads, {.doc = "KDA heads", .min = 0, .max = 4096, .required = true});
    visit("short_conv_kernel_size", short_conv_kernel_size,
          {.doc = "convolution taps", .min = 2, .max = 16, .required = true});
    visit("kda_layers", kda_layers, {.doc = "KDA layers, from 1", .min = 1, .max = 4096, .required = true});
    visit("full_attn_layers", full_attn_layers, {.doc = "MLA layers, from 1", .min = 1, .max = 4096, .required = true});
    visit("use_full_rank_gate", use_full_rank_gate, {.doc = "output gate as one matrix"});
    visit("gate_lower_bound", gate_lower_bound, {.doc = "bounded gate", .min = -5, .max = -0.01});
  }
};

/// What published files cannot say and Furlong's own may.
struct HfFurlong {
  bool mla_output_fp32 = true;
  double mla_latent_norm_eps = 1e-6;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("mla_output_fp32", mla_output_fp32, {.doc = "attention output kept in fp32 up to the gate"});
    visit("mla_latent_norm_eps", mla_latent_norm_eps, {.doc = "eps of the latent norms", .min = 1e-12, .max = 1e-2});
  }
};

struct HfText {
  int64_t vocab_size = 0, hidden_size = 0, num_hidden_layers = 0, num_attention_heads = 0;
  std::optional<int64_t> num_key_value_heads;
  int64_t intermediate_size = 0;
  std::string hidden_act;
  double initializer_range = 0.02, rms_norm_eps = 1e-5;
  bool tie_word_embeddings = false;
  std::optional<int64_t> max_position_embeddings, model_max_length;
  std::optional<int64_t> num_experts, num_experts_per_token, num_shared_experts, moe_intermediate_size;
  std::optional<bool> moe_renormalize, use_grouped_topk;
  std::string moe_router_activation_func = "sigmoid", topk_method = "noaux_tc";
  double routed_scaling_factor = 1.0;
  int64_t first_k_dense_replace = 0, moe_layer_freq = 1, num_expert_group = 1, topk_group = 1;
  std::optional<int64_t> routed_expert_hidden_size, q_lora_rank, attn_res_block_size;
  std::optional<bool> latent_moe_use_norm, mla_use_output_gate;
  int64_t kv_lora_rank = 0, qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;
  bool mla_use_nope = false;
  HfLinearAttention linear_attn_config;
  std::optional<double> activation_situ_beta, activation_situ_linear_beta;
  int64_t num_nextn_predict_layers = 0;
  HfFurlong furlong;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("vocab_size", vocab_size, {.doc = "vocabulary", .min = 2, .max = 1 << 24, .required = true});
    visit("hidden_size", hidden_size, {.doc = "residual width", .min = 1, .max = kMaxWidth, .required = true});
    visit("intermediate_size", intermediate_size, {.doc = "dense MLP", .min = 0, .max = kMaxWidth, .required = true});
    visit("num_hidden_layers", num_hidden_layers, {.doc = "layers", .min = 1, .max = 4096, .required = true});
    visit("num_attention_heads", num_attention_heads, {.doc = "MLA heads", .min = 0, .max = 4096, .required = true});
    visit("num_key_value_heads", num_key_value_heads, {.doc = "must equal num_attention_heads", .min = 0, .max = 4096});
    visit("hidden_act", hidden_act, {.doc = "activation", .one_of = {"silu", "situ"}, .required = true});
    visit("initializer_range", initializer_range, {.doc = "initial std", .min = 0, .max = 10});
    visit("rms_norm_eps", rms_norm_eps, {.doc = "norm eps", .min = 1e-12, .max = 1e-2, .required = true});
    visit("tie_word_embeddings", tie_word_embeddings, {.doc = "tied head"});
    visit("max_position_embeddings", max_position_embeddings, {.doc = "longest context", .min = 1, .max = 1e9});
    visit("model_max_length", model_max_length, {.doc = "longest context", .min = 1, .max = 1e9});
    expert_fields(visit);
    visit("q_lora_rank", q_lora_rank, {.doc = "query rank, null: full", .min = 0, .max = kMaxWidth});
    visit("kv_lora_rank", kv_lora_rank, {.doc = "latent width", .min = 0, .max = kMaxWidth, .required = true});
    visit("qk_nope_head_dim", qk_nope_head_dim, {.doc = "key size", .min = 0, .max = 4096, .required = true});
    visit("qk_rope_head_dim", qk_rope_head_dim, {.doc = "shared key size", .min = 0, .max = 4096, .required = true});
    visit("v_head_dim", v_head_dim, {.doc = "value size", .min = 0, .max = 4096, .required = true});
    visit("mla_use_nope", mla_use_nope, {.doc = "must be true: rotary positions are not supported", .required = true});
    visit("mla_use_output_gate", mla_use_output_gate, {.doc = "gate before o_proj"});
    visit("linear_attn_config", linear_attn_config, {.doc = "KDA", .required = true});
    visit("attn_res_block_size", attn_res_block_size, {.doc = "layers in a block", .min = 1, .max = 4096});
    visit("activation_situ_beta", activation_situ_beta, {.doc = "gate cap", .min = 1e-3, .max = 1e6});
    visit("activation_situ_linear_beta", activation_situ_linear_beta, {.doc = "linear cap", .min = 1e-3, .max = 1e6});
    visit("num_nextn_predict_layers", num_nextn_predict_layers, {.doc = "extra heads", .min = 0, .max = 64});
    visit("furlong", furlong, {.doc = "keys of this program"});
  }

  template <typename Visitor>
  void expert_fields(Visitor& visit) {
    visit("moe_intermediate_size", moe_intermediate_size, {.doc = "expert width", .min = 0, .max = kMaxWidth});
    visit("num_experts", num_experts, {.doc = "experts, null: none", .min = 0, .max = 65536});
    visit("num_experts_per_token", num_experts_per_token, {.doc = "experts chosen", .min = 0, .max = 1024});
    visit("num_shared_experts", num_shared_experts, {.doc = "shared experts", .min = 0, .max = 64});
    visit("routed_expert_hidden_size", routed_expert_hidden_size, {.doc = "latent", .min = 0, .max = kMaxWidth});
    visit("latent_moe_use_norm", latent_moe_use_norm, {.doc = "norm of the combined latent"});
    visit("moe_router_activation_func", moe_router_activation_func, {.doc = "scores", .one_of = {"sigmoid"}});
    visit("moe_renormalize", moe_renormalize, {.doc = "weights sum to one"});
    visit("routed_scaling_factor", routed_scaling_factor, {.doc = "weight factor", .min = 1e-6, .max = 1e3});
    visit("use_grouped_topk", use_grouped_topk, {.doc = "grouped selection"});
    visit("num_expert_group", num_expert_group, {.doc = "groups", .min = 1, .max = 4096});
    visit("topk_group", topk_group, {.doc = "groups kept", .min = 1, .max = 4096});
    visit("topk_method", topk_method, {.doc = "selection", .one_of = {"noaux_tc"}});
    visit("first_k_dense_replace", first_k_dense_replace, {.doc = "dense layers", .min = 0, .max = 4096});
    visit("moe_layer_freq", moe_layer_freq, {.doc = "every n-th layer", .min = 1, .max = 4096});
  }
};

/// Keys without meaning for this program: token ids, library switches, the packing of weights (seen in the tensors).
constexpr std::array kIgnored = {
    "architectures",
    "model_type",
    "auto_map",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "rope_theta",
    "_name_or_path",
    "attention_dropout",
    "attention_bias",
    "vision_config",
    "image_placeholder",
    "ignore_index",
    "quantization_config",
    "media_placeholder_token_id",
    "_attn_implementation",
    "output_router_logits",
    "router_aux_loss_coef",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
};
constexpr std::array kRotary = {"rope_scaling", "rope_parameters", "partial_rotary_factor"};
/// Keys that the nested form must hold, null for "off": leaving one out would silently build another model.
constexpr std::array kSwitches = {"attn_res_block_size", "routed_expert_hidden_size",
                                  "latent_moe_use_norm", "mla_use_output_gate",
                                  "q_lora_rank",         "num_experts"};
constexpr std::array kExpertKeys = {"num_experts_per_token",     "num_shared_experts",    "moe_intermediate_size",
                                    "moe_renormalize",           "routed_scaling_factor", "first_k_dense_replace",
                                    "moe_router_activation_func"};

/// Keys of ModelConfig that its cross-checks may name, as published.
const std::map<std::string, std::string>& published_keys() {
  static const std::map<std::string, std::string> names = {
      {"full_attention_layers", "linear_attn_config.full_attn_layers"},
      {"attnres_block_size", "attn_res_block_size"},
      {"kda.heads", "linear_attn_config.num_heads"},
      {"kda.head_size", "linear_attn_config.head_dim"},
      {"mla.heads", "num_attention_heads"},
      {"mla.kv_lora_rank", "kv_lora_rank"},
      {"mla.qk_nope_head_dim", "qk_nope_head_dim"},
      {"mla.v_head_dim", "v_head_dim"},
      {"moe.first_dense_layers", "first_k_dense_replace"},
      {"moe.experts_per_token", "num_experts_per_token"},
      {"moe.expert_size", "moe_intermediate_size"},
      {"moe.expert_groups", "num_expert_group"},
      {"moe.expert_groups_kept", "topk_group"},
  };
  return names;
}

struct KeyNames {
  std::vector<std::string> names;
  template <typename T>
  void operator()(const char* key, T&, const FieldRule& = {}) {
    names.emplace_back(key);
  }
};

[[noreturn]] void refuse(const std::string& where, const std::string& why) {
  throw ConfigError(where + ": " + why);
}

/// Removes what may be ignored; a misspelt key is named before a missing one, which it would also cause.
Json known_keys(Json text, const std::string& where) {
  for (const char* key : kRotary) {
    if (text.contains(key) && !text[key].is_null()) {
      refuse(where, fmt::format("key '{}' is set, but text models of this kind have no rotary positions", key));
    }
    text.erase(key);
  }
  for (const char* key : kIgnored) text.erase(key);
  HfText names_only;
  KeyNames known;
  names_only.fields(known);
  for (const auto& [key, value] : text.items()) {
    if (std::find(known.names.begin(), known.names.end(), key) != known.names.end()) continue;
    const std::string close = closest_word(key, known.names);
    refuse(where,
           fmt::format("unknown key '{}'{}", key, close.empty() ? "" : fmt::format(" (did you mean '{}'?)", close)));
  }
  return text;
}

void require_keys(const Json& text, const std::string& where, bool nested) {
  const auto need = [&](const Json& table, const char* key, const char* prefix) {
    if (!table.contains(key)) refuse(where, fmt::format("missing key '{}{}'", prefix, key));
  };
  need(text, "q_lora_rank", "");
  need(text, "num_experts", "");
  if (nested) {
    for (const char* key : kSwitches) need(text, key, "");
    need(text["linear_attn_config"], "use_full_rank_gate", "linear_attn_config.");
    need(text["linear_attn_config"], "gate_lower_bound", "linear_attn_config.");
  }
  if (text["hidden_act"] == "situ") {
    need(text, "activation_situ_beta", "");
    need(text, "activation_situ_linear_beta", "");
  }
  if (text["num_experts"].is_null()) return;
  for (const char* key : kExpertKeys) need(text, key, "");
}

void check_fixed(const HfText& hf, const std::string& where) {
  if (!hf.mla_use_nope) refuse(where, "key 'mla_use_nope' is false: rotary positions are not supported");
  if (hf.num_key_value_heads.value_or(hf.num_attention_heads) != hf.num_attention_heads) {
    refuse(where, "key 'num_key_value_heads' must equal num_attention_heads");
  }
  if (hf.num_nextn_predict_layers != 0) {
    refuse(where, "key 'num_nextn_predict_layers' must be 0: multi-token prediction heads are not supported");
  }
  if (!hf.max_position_embeddings && !hf.model_max_length) {
    refuse(where, "missing key 'max_position_embeddings' or 'model_max_length'");
  }
  const auto& linear = hf.linear_attn_config;
  std::vector<bool> seen(hf.num_hidden_layers + 1, false);
  for (const auto* list : {&linear.kda_layers, &linear.full_attn_layers}) {
    for (const int64_t layer : *list) {
      if (layer < 1 || layer > hf.num_hidden_layers || seen[layer]) {
        refuse(where, fmt::format("keys 'linear_attn_config.kda_layers' and '.full_attn_layers': layer {} is named "
                                  "twice or is not in 1..{}",
                                  layer, hf.num_hidden_layers));
      }
      seen[layer] = true;
    }
  }
  if (static_cast<int64_t>(linear.kda_layers.size() + linear.full_attn_layers.size()) != hf.num_hidden_layers) {
    refuse(where, "keys 'linear_attn_config.kda_layers' and '.full_attn_layers' must name every layer once");
  }
}

ModelConfig to_model(const HfText& hf) {
  ModelConfig c;
  c.vocab_size = hf.vocab_size;
  c.hidden_size = hf.hidden_size;
  c.num_layers = hf.num_hidden_layers;
  c.full_attention_layers = hf.linear_attn_config.full_attn_layers;
  c.intermediate_size = hf.intermediate_size;
  c.activation = hf.hidden_act == "situ" ? "situ" : "swiglu";
  c.situ_beta = hf.activation_situ_beta.value_or(1.0);
  c.situ_linear_beta = hf.activation_situ_linear_beta.value_or(0.0);
  c.attnres_block_size = hf.attn_res_block_size.value_or(0);
  c.norm_eps = hf.rms_norm_eps;
  c.init_std = hf.initializer_range;
  c.tie_embeddings = hf.tie_word_embeddings;
  c.max_context = hf.max_position_embeddings ? *hf.max_position_embeddings : *hf.model_max_length;
  c.kda = {.heads = hf.linear_attn_config.num_heads,
           .head_size = hf.linear_attn_config.head_dim,
           .conv_kernel = hf.linear_attn_config.short_conv_kernel_size,
           .gate_lower_bound = hf.linear_attn_config.gate_lower_bound.value_or(0.0),
           .full_rank_gate = hf.linear_attn_config.use_full_rank_gate.value_or(false)};
  c.mla = {.heads = hf.num_attention_heads,
           .q_lora_rank = hf.q_lora_rank.value_or(0),
           .kv_lora_rank = hf.kv_lora_rank,
           .qk_nope_head_dim = hf.qk_nope_head_dim,
           .qk_rope_head_dim = hf.qk_rope_head_dim,
           .v_head_dim = hf.v_head_dim,
           .output_gate = hf.mla_use_output_gate.value_or(false),
           .output_fp32 = hf.furlong.mla_output_fp32,
           .latent_norm_eps = hf.furlong.mla_latent_norm_eps};
  if (hf.num_experts.value_or(0) == 0) return c;
  const bool grouped = hf.use_grouped_topk.value_or(true);
  c.moe = {.num_experts = *hf.num_experts,
           .experts_per_token = hf.num_experts_per_token.value_or(0),
           .shared_experts = hf.num_shared_experts.value_or(0),
           .expert_size = hf.moe_intermediate_size.value_or(0),
           .latent_size = hf.routed_expert_hidden_size.value_or(0),
           .latent_norm = hf.latent_moe_use_norm.value_or(false),
           .first_dense_layers = hf.first_k_dense_replace,
           .layer_freq = hf.moe_layer_freq,
           .expert_groups = grouped ? hf.num_expert_group : 1,
           .expert_groups_kept = grouped ? hf.topk_group : 1,
           .renormalize = hf.moe_renormalize.value_or(true),
           .routed_scale = hf.routed_scaling_factor};
  return c;
}

template <typename T>
std::optional<T> unless(bool off, T value) {
  return off ? std::nullopt : std::optional<T>(value);
}

HfLinearAttention linear_from_model(const ModelConfig& c, bool nested) {
  HfLinearAttention linear;
  linear.head_dim = c.kda.head_size;
  linear.num_heads = c.kda.heads;
  linear.short_conv_kernel_size = c.kda.conv_kernel;
  for (int64_t layer = 0; layer < c.num_layers; ++layer) {
    (c.is_full_attention(layer) ? linear.full_attn_layers : linear.kda_layers).push_back(layer + 1);
  }
  linear.gate_lower_bound = unless(c.kda.gate_lower_bound == 0, c.kda.gate_lower_bound);
  if (nested) linear.use_full_rank_gate = c.kda.full_rank_gate;
  return linear;
}

HfText from_model(const ModelConfig& c, bool nested) {
  HfText hf;
  hf.vocab_size = c.vocab_size;
  hf.hidden_size = c.hidden_size;
  hf.num_hidden_layers = c.num_layers;
  hf.num_attention_heads = c.mla.heads;
  hf.num_key_value_heads = c.mla.heads;
  hf.intermediate_size = c.intermediate_size;
  hf.hidden_act = c.activation == "situ" ? "situ" : "silu";
  hf.initializer_range = c.init_std;
  hf.rms_norm_eps = c.norm_eps;
  hf.tie_word_embeddings = c.tie_embeddings;
  (nested ? hf.max_position_embeddings : hf.model_max_length) = c.max_context;
  hf.q_lora_rank = unless(c.mla.q_lora_rank == 0, c.mla.q_lora_rank);
  hf.kv_lora_rank = c.mla.kv_lora_rank;
  hf.qk_nope_head_dim = c.mla.qk_nope_head_dim;
  hf.qk_rope_head_dim = c.mla.qk_rope_head_dim;
  hf.v_head_dim = c.mla.v_head_dim;
  hf.mla_use_nope = true;
  hf.linear_attn_config = linear_from_model(c, nested);
  hf.attn_res_block_size = unless(c.attnres_block_size == 0, c.attnres_block_size);
  if (nested) hf.mla_use_output_gate = c.mla.output_gate;
  if (c.activation == "situ") {
    hf.activation_situ_beta = c.situ_beta;
    hf.activation_situ_linear_beta = unless(c.situ_linear_beta == 0, c.situ_linear_beta);
  }
  hf.furlong = {.mla_output_fp32 = c.mla.output_fp32, .mla_latent_norm_eps = c.mla.latent_norm_eps};
  if (c.moe.num_experts == 0) return hf;
  hf.num_experts = c.moe.num_experts;
  hf.num_experts_per_token = c.moe.experts_per_token;
  hf.num_shared_experts = c.moe.shared_experts;
  hf.moe_intermediate_size = c.moe.expert_size;
  hf.moe_renormalize = c.moe.renormalize;
  hf.routed_scaling_factor = c.moe.routed_scale;
  hf.first_k_dense_replace = c.moe.first_dense_layers;
  hf.moe_layer_freq = c.moe.layer_freq;
  hf.use_grouped_topk = true;
  hf.num_expert_group = c.moe.expert_groups;
  hf.topk_group = c.moe.expert_groups_kept;
  hf.routed_expert_hidden_size = unless(c.moe.latent_size == 0, c.moe.latent_size);
  if (nested) hf.latent_moe_use_norm = c.moe.latent_norm;
  return hf;
}

/// Empty if there is none, or something else than a text.
std::string model_type(const Json& config) {
  const auto found = config.find("model_type");
  return found != config.end() && found->is_string() ? found->get<std::string>() : "";
}

}  // namespace

ModelConfig ModelConfig::from_hugging_face(const Json& config, const std::string& where) {
  if (!config.is_object()) refuse(where, "must be a JSON object");
  const bool nested = config.contains("text_config");
  if (!nested && model_type(config) == "kimi_k3") refuse(where, "missing key 'text_config'");
  const Json& inner = nested ? config["text_config"] : config;
  if (!inner.is_object()) refuse(where, "key 'text_config' must be an object");
  const std::string type = model_type(inner);
  if (type != "kimi_linear") {
    refuse(where, fmt::format("key 'model_type' is '{}', must be kimi_linear (alone or inside kimi_k3)", type));
  }
  const std::string inside = nested ? where + " (text_config)" : where;
  const Json text = known_keys(inner, inside);
  HfText hf;
  ConfigReader reader(text, inside);
  hf.fields(reader);
  reader.finish();
  require_keys(text, inside, nested);
  check_fixed(hf, inside);
  ModelConfig model = to_model(hf);
  model.drop_unused();
  model.validate(inside, published_keys());
  return model;
}

OrderedJson ModelConfig::to_hugging_face() const {
  const bool nested = has_k3_mechanism();
  OrderedJson text;
  text["architectures"] = OrderedJson::array({"KimiLinearForCausalLM"});
  text["model_type"] = "kimi_linear";
  const OrderedJson values = config_to_json(from_model(*this, nested));
  for (const auto& [key, value] : values.items()) text[key] = value;
  if (mla.output_fp32 && mla.latent_norm_eps == HfFurlong{}.mla_latent_norm_eps) text.erase("furlong");
  text["torch_dtype"] = "float32";
  const auto null_if_absent = [](OrderedJson& table, const char* key) {
    if (!table.contains(key)) table[key] = nullptr;
  };
  null_if_absent(text, "q_lora_rank");
  null_if_absent(text, "num_experts");
  if (!nested) return text;
  for (const char* key : kSwitches) null_if_absent(text, key);
  null_if_absent(text["linear_attn_config"], "gate_lower_bound");
  if (activation == "situ") null_if_absent(text, "activation_situ_linear_beta");
  OrderedJson outer;
  outer["architectures"] = OrderedJson::array({"KimiK3ForConditionalGeneration"});
  outer["model_type"] = "kimi_k3";
  outer["text_config"] = std::move(text);
  outer["tie_word_embeddings"] = tie_embeddings;
  return outer;
}

}  // namespace furlong
