#include "furlong/model/decoder_layer.h"

#include "furlong/ops/norm/norm.h"

namespace furlong {

Activation activation_of(const ModelConfig& config) {
  if (config.activation != "situ") return {};
  Activation situ{.kind = Activation::Kind::kSitu, .beta = config.situ_beta};
  if (config.situ_linear_beta > 0) situ.linear_beta = config.situ_linear_beta;
  return situ;
}

KdaLayerConfig kda_layer_of(const ModelConfig& config) {
  const double bound = config.kda.gate_lower_bound;
  return {.hidden_size = config.hidden_size,
          .num_heads = config.kda.heads,
          .head_size = config.kda.head_size,
          .conv_kernel = config.kda.conv_kernel,
          .gate_lower_bound = bound < 0 ? std::optional<double>(bound) : std::nullopt,
          .full_rank_gate = config.kda.full_rank_gate,
          .norm_eps = config.norm_eps,
          .init_std = config.init_std};
}

MlaLayerConfig mla_layer_of(const ModelConfig& config) {
  return {.hidden_size = config.hidden_size,
          .num_heads = config.mla.heads,
          .q_lora_rank = config.mla.q_lora_rank,
          .kv_lora_rank = config.mla.kv_lora_rank,
          .qk_nope_head_dim = config.mla.qk_nope_head_dim,
          .qk_rope_head_dim = config.mla.qk_rope_head_dim,
          .v_head_dim = config.mla.v_head_dim,
          .output_gate = config.mla.output_gate,
          .output_fp32 = config.mla.output_fp32,
          .latent_norm_eps = config.mla.latent_norm_eps,
          .init_std = config.init_std};
}

MoeLayerConfig moe_layer_of(const ModelConfig& config) {
  return {.hidden_size = config.hidden_size,
          .latent_size = config.moe.latent_size,
          .latent_norm = config.moe.latent_norm,
          .expert_size = config.moe.expert_size,
          .num_experts = config.moe.num_experts,
          .num_shared_experts = config.moe.shared_experts,
          .route = {.num_chosen = config.moe.experts_per_token,
                    .num_groups = config.moe.expert_groups,
                    .groups_kept = config.moe.expert_groups_kept,
                    .renormalize = config.moe.renormalize,
                    .scale = config.moe.routed_scale},
          .activation = activation_of(config),
          .norm_eps = config.norm_eps,
          .init_std = config.init_std};
}

DecoderLayer::DecoderLayer(const ModelConfig& config, int64_t index)
    : index_(index), norm_eps_(config.norm_eps), hidden_size_(config.hidden_size) {
  if (config.is_full_attention(index)) {
    mla_.emplace(mla_layer_of(config));
  } else {
    kda_.emplace(kda_layer_of(config));
  }
  if (config.is_moe(index)) {
    moe_ = std::make_unique<MoeLayer>(moe_layer_of(config));
  } else {
    mlp_.emplace(GluMlpConfig{.hidden_size = config.hidden_size,
                              .intermediate_size = config.intermediate_size,
                              .activation = activation_of(config),
                              .init_std = config.init_std});
  }
  if (config.attnres_block_size > 0) {
    // Layer 0 reads the bare embedding; the published checkpoints hold an unused attention read for it all the same.
    attention_read_.emplace(config.hidden_size, config.norm_eps);
    mlp_read_.emplace(config.hidden_size, config.norm_eps);
  }
}

void DecoderLayer::declare(ParamList& list, const std::string& prefix) {
  const size_t first = list.params().size();
  const Init one = Init::constant(1.0);
  list.add(prefix, {.name = "input_layernorm.weight", .shape = {hidden_size_}, .weight_decay = false, .init = one},
           &input_norm_);
  list.add(prefix,
           {.name = "post_attention_layernorm.weight", .shape = {hidden_size_}, .weight_decay = false, .init = one},
           &post_norm_);
  if (attention_read_) attention_read_->declare(list, prefix + "self_attention_res");
  if (mlp_read_) mlp_read_->declare(list, prefix + "mlp_res");
  if (kda_) kda_->declare(list, prefix + "self_attn.");
  if (mla_) mla_->declare(list, prefix + "self_attn.");
  if (mlp_) mlp_->declare(list, prefix + "mlp.");
  if (moe_) moe_->declare(list, prefix + "block_sparse_moe.");
  for (size_t i = first; i < list.params().size(); ++i) tensors_.push_back(list.params()[i].tensor);
}

at::Tensor DecoderLayer::mix_tokens(const at::Tensor& x_ND, const SequenceLayout& layout, DecoderState* state,
                                    const ForwardContext& context) const {
  if (kda_) return kda_->forward(x_ND, layout, state ? state->kda(index_) : nullptr, context);
  return mla_->forward(x_ND, layout, state ? state->mla(index_) : nullptr, context);
}

at::Tensor DecoderLayer::feed_forward(const at::Tensor& x_ND, const SequenceLayout& layout,
                                      const ForwardContext& context) const {
  return moe_ ? moe_->forward(x_ND, layout, context) : mlp_->forward(x_ND, context);
}

void DecoderLayer::forward(ResidualStream& stream, const SequenceLayout& layout, DecoderState* state,
                           const ForwardContext& context) const {
  LayerRecord* record = context.record;
  const at::Tensor h_ND = attention_read_
                              ? stream.read(*attention_read_, record ? &record->attention_depth_weight_S : nullptr)
                              : stream.prefix();
  if (mlp_read_) stream.seal_before(index_);
  stream.add(mix_tokens(rms_norm(h_ND, input_norm_, norm_eps_), layout, state, context));
  const at::Tensor h2_ND =
      mlp_read_ ? stream.read(*mlp_read_, record ? &record->mlp_depth_weight_S : nullptr) : stream.prefix();
  stream.add(feed_forward(rms_norm(h2_ND, post_norm_, norm_eps_), layout, context));
}

}  // namespace furlong
