#include "furlong/model/count.h"

#include "furlong/model/decoder.h"

namespace furlong {

ModelCount count(const ModelConfig& config) {
  const Decoder decoder(config);  // holds no tensors
  ModelCount total;
  for (const Param& param : decoder.params()) {
    const auto size = static_cast<double>(param.spec.numel());
    total.parameters += size;
    if (param.spec.name == "model.embed_tokens.weight") {
      total.embedding_parameters = size;
      if (config.tie_embeddings) total.active_parameters += size;  // as the output head
    } else if (param.spec.routed_expert) {
      total.routed_expert_parameters += size;
      total.active_parameters +=
          size * static_cast<double>(config.moe.experts_per_token) / static_cast<double>(config.moe.num_experts);
    } else {
      total.active_parameters += size;
    }
  }
  const auto kda_layers = static_cast<double>(config.num_layers - config.num_full_attention());
  const auto mla_layers = static_cast<double>(config.num_full_attention());
  const auto heads = static_cast<double>(config.kda.heads), head_size = static_cast<double>(config.kda.head_size);
  const double state_entries = kda_layers * heads * head_size * head_size;
  total.flops_per_token = 2.0 * total.active_parameters;
  total.kda_flops_per_token = 7.0 * state_entries;
  total.state_bytes = 4.0 * state_entries;
  total.conv_state_bytes = 2.0 * kda_layers * static_cast<double>(config.kda.conv_kernel - 1) * 3.0 * heads * head_size;
  total.cache_bytes_per_token =
      2.0 * mla_layers * static_cast<double>(config.mla.kv_lora_rank + config.mla.qk_rope_head_dim);
  return total;
}

}  // namespace furlong
