#include "furlong/model/plan.h"

#include <algorithm>

#include "furlong/model/count.h"
#include "furlong/model/decoder.h"

namespace furlong {

namespace {

constexpr double kFp32Bytes = 4.0;
constexpr double kChunkTokens = 32.0;        // KDA keeps the state entering each chunk, and a value row of each token
constexpr double kLossChunkTokens = 1024.0;  // logits exist for this many tokens at a time
constexpr double kLossBuffers = 2.0;         // logits and their gradient

/// Bytes that autograd keeps for one token in one layer's parts. `c` is the size of a compute-dtype element.
class TokenBytes {
 public:
  TokenBytes(const ModelConfig& config, double c) : config_(config), c_(c) {}

  double layer(int64_t index) const {
    return stream() + (config_.is_full_attention(index) ? mla() : kda()) + (config_.is_moe(index) ? moe() : dense());
  }
  /// What recomputation keeps of a layer: its new prefix.
  double layer_input() const { return c_ * hidden(); }
  double hidden() const { return static_cast<double>(config_.hidden_size); }

 private:
  /// Two reads, two norms (input and result of each) and two sums.
  double stream() const { return c_ * hidden() * (config_.attnres_block_size > 0 ? 6 : 4); }

  /// q, k, v before and after the convolution, q and k normalised, gate inputs, outputs; decay in fp32; chunk states.
  double kda() const {
    const auto head = static_cast<double>(config_.kda.head_size);
    const double width = static_cast<double>(config_.kda.heads) * head;
    return c_ * (12 * width + head) + 2 * kFp32Bytes * width + kFp32Bytes * width * head / kChunkTokens;
  }

  /// Latents and their norms, q, expanded keys and values, output, gate; fp32 copies of what attention reads.
  double mla() const {
    const auto& mla = config_.mla;
    const auto heads = static_cast<double>(mla.heads), value = heads * static_cast<double>(mla.v_head_dim);
    const double key = heads * static_cast<double>(mla.qk_nope_head_dim + mla.qk_rope_head_dim);
    const double latents =
        2.0 * static_cast<double>(mla.q_lora_rank) + 3.0 * static_cast<double>(mla.kv_lora_rank + mla.qk_rope_head_dim);
    const double wide = mla.output_fp32 && c_ < kFp32Bytes ? kFp32Bytes * (2 * key + 2 * value) : 0.0;
    return c_ * (latents + 3 * key + 4 * value) + wide;
  }

  double dense() const { return c_ * 3.0 * static_cast<double>(config_.intermediate_size); }

  /// Router scores in fp32; for each chosen expert its sorted input, both halves, activation and output in fp32.
  double moe() const {
    const auto& moe = config_.moe;
    const auto chosen = static_cast<double>(moe.experts_per_token), width = static_cast<double>(moe.expert_size);
    const double latent = moe.latent_size > 0 ? static_cast<double>(moe.latent_size) : hidden();
    const double routed = chosen * (c_ * (latent + 3 * width) + kFp32Bytes * latent);
    const double shared = c_ * 3.0 * width * static_cast<double>(moe.shared_experts);
    const double router = kFp32Bytes * (hidden() + 2.0 * static_cast<double>(moe.num_experts));
    return routed + shared + router + c_ * 3.0 * latent;
  }

  const ModelConfig& config_;
  double c_;
};

}  // namespace

TrainingBytes plan_training(const ModelConfig& config, const PlanRequest& request) {
  const double c = request.bf16 ? 2.0 : kFp32Bytes;
  const double tokens = static_cast<double>(request.context) * static_cast<double>(request.batch);
  const Decoder decoder(config);
  TrainingBytes bytes;
  double matrices = 0;
  for (const Param& param : decoder.params()) {
    const auto size = static_cast<double>(param.spec.numel());
    bytes.weights += kFp32Bytes * size;
    if (param.spec.rule == OptimizerRule::kFrozen) continue;
    bytes.gradients += kFp32Bytes * size;
    bytes.optimizer += kFp32Bytes * size * (param.spec.rule == OptimizerRule::kMuon && request.muon ? 1 : 2);
    if (param.spec.dtype == DtypePolicy::kCompute) matrices += size;
  }
  const TokenBytes token(config, c);
  double kept = 0, largest = 0;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    kept += request.recompute ? token.layer_input() : token.layer(layer);
    largest = std::max(largest, token.layer(layer));
  }
  if (request.recompute) kept += largest;
  const double loss_rows = std::min(tokens, kLossChunkTokens);
  const double loss = kLossBuffers * kFp32Bytes * loss_rows * static_cast<double>(config.vocab_size);
  // Backward holds gradients of about one layer's activations on top; bf16 products keep the cast weights.
  bytes.activations =
      tokens * (kept + 0.5 * largest + 4 * c * token.hidden()) + loss + (request.bf16 ? c * matrices : 0);
  return bytes;
}

ServingBytes plan_serving(const ModelConfig& config, const PlanRequest& request) {
  const ModelCount sizes = count(config);
  const auto batch = static_cast<double>(request.batch), context = static_cast<double>(request.context);
  const double wider = request.bf16 ? 1.0 : 2.0;  // count() gives tails and caches in bf16
  const Decoder decoder(config);
  ServingBytes bytes;
  for (const Param& param : decoder.params()) {
    const bool narrow = request.bf16 && param.spec.dtype == DtypePolicy::kCompute;
    bytes.weights += static_cast<double>(param.spec.numel()) * (narrow ? 2.0 : kFp32Bytes);
  }
  bytes.state = batch * sizes.state_bytes;
  bytes.conv_state = batch * wider * sizes.conv_state_bytes;
  bytes.cache = batch * context * wider * sizes.cache_bytes_per_token;
  return bytes;
}

}  // namespace furlong
