#include "furlong/model/decoder.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <fmt/format.h>

#include "furlong/base/shape.h"
#include "furlong/model/decoder_layer.h"
#include "furlong/model/initialize.h"
#include "furlong/model/run_layer.h"
#include "furlong/model/state.h"
#include "furlong/ops/common/linear.h"
#include "furlong/ops/norm/norm.h"

namespace furlong {

Decoder::Decoder(const ModelConfig& config) : config_(config) {
  config_.validate("model");
  const Init normal = Init::normal(config.init_std);
  const std::vector<int64_t> table = {config.vocab_size, config.hidden_size};
  list_.add("model.", {.name = "embed_tokens.weight", .shape = table, .init = normal}, &embedding_);
  for (int64_t index = 0; index < config.num_layers; ++index) {
    layers_.push_back(std::make_unique<DecoderLayer>(config, index));
    layers_.back()->declare(list_, fmt::format("model.layers.{}.", index));
  }
  if (config.attnres_block_size > 0) {
    output_read_ = std::make_unique<AttnResRead>(config.hidden_size, config.norm_eps);
    output_read_->declare(list_, "model.output_attn_res");
  }
  list_.add("model.",
            {.name = "norm.weight", .shape = {config.hidden_size}, .weight_decay = false, .init = Init::constant(1.0)},
            &final_norm_);
  if (!config.tie_embeddings) list_.add("", {.name = "lm_head.weight", .shape = table, .init = normal}, &lm_head_);
}

Decoder::~Decoder() = default;

void Decoder::initialize(uint64_t seed, at::ScalarType dtype, at::Device device, bool trainable) {
  for (const Param& param : params()) {
    const at::ScalarType stored = param.spec.dtype == DtypePolicy::kFp32 ? at::kFloat : dtype;
    *param.tensor = draw_initial(param.spec, seed).to(device, stored);
    param.tensor->set_requires_grad(trainable && param.spec.rule != OptimizerRule::kFrozen);
  }
  compute_dtype_ = dtype;
}

void Decoder::allocate(at::ScalarType dtype, at::Device device) {
  for (const Param& param : params()) {
    const at::ScalarType stored = param.spec.dtype == DtypePolicy::kFp32 ? at::kFloat : dtype;
    *param.tensor = at::empty(param.spec.shape, at::TensorOptions().dtype(stored).device(device));
  }
  compute_dtype_ = dtype;
}

at::Device Decoder::device() const {
  check_argument(embedding_.defined(), "Decoder", "parameters: not initialised");
  return embedding_.device();
}

at::Tensor Decoder::embed(const at::Tensor& tokens_N, const SequenceLayout& layout) const {
  check_shape("Decoder", "tokens_N", tokens_N, {-1});
  check_dtype("Decoder", "tokens_N", tokens_N, at::kLong);
  const int64_t rows = tokens_N.size(0), used = layout.num_tokens();
  check_argument(used <= rows, "Decoder",
                 fmt::format("tokens_N: got {} tokens, the layout's sequences need {}", rows, used));
  const at::Tensor tokens = used < rows ? tokens_N.slice(0, 0, used) : tokens_N;
  if (tokens.is_cpu() && used > 0) {
    const auto low = tokens.min().item<int64_t>(), high = tokens.max().item<int64_t>();
    check_argument(low >= 0 && high < config_.vocab_size, "Decoder",
                   fmt::format("tokens_N: got ids in [{}, {}], the vocabulary has {}", low, high, config_.vocab_size));
  }
  const at::Tensor x_ND = at::embedding(embedding_, tokens).to(compute_dtype_);
  return used < rows ? at::constant_pad_nd(x_ND, {0, 0, 0, rows - used}) : x_ND;
}

at::Tensor Decoder::forward(const at::Tensor& tokens_N, const SequenceLayout& layout, DecoderState* state,
                            const ForwardOptions& options) const {
  std::optional<at::NoGradGuard> no_grad;  // states are written in place
  if (state != nullptr) {
    no_grad.emplace();
    state->reserve(layout);
  }
  ResidualStream stream(embed(tokens_N, layout), config_.attnres_block_size);
  ForwardRecord* record = options.record;
  const bool keep_stream = record != nullptr && record->keep_stream;
  if (record != nullptr) record->layers.assign(layers_.size(), {});
  if (keep_stream) record->stream_ND.clear();
  for (size_t i = 0; i < layers_.size(); ++i) {
    ForwardContext context;
    context.numerics = options.numerics;
    context.training = options.training;
    if (record != nullptr) context.record = &record->layers[i];
    if (options.forced_expert_ids != nullptr) context.forced_expert_ids_NA = options.forced_expert_ids->at(i);
    if (at::GradMode::is_enabled()) {
      stream = run_layer(*layers_[i], stream, config_.attnres_block_size, layout, context, options.recompute);
    } else {
      layers_[i]->forward(stream, layout, state, context);
    }
    if (keep_stream) record->stream_ND.push_back(stream.prefix().detach());
  }
  if (keep_stream) record->blocks_ND = stream.blocks();
  const at::Tensor x_ND =
      output_read_ ? stream.read(*output_read_, record ? &record->output_depth_weight_S : nullptr) : stream.prefix();
  if (state != nullptr) state->advance(layout, tokens_N);
  return rms_norm(x_ND, final_norm_, config_.norm_eps);
}

at::Tensor Decoder::logits(const at::Tensor& hidden_MD, Numerics numerics) const {
  return linear(hidden_MD, head_weight(), numerics).to(at::kFloat);
}

const at::Tensor& Decoder::head_weight() const {
  return config_.tie_embeddings ? embedding_ : lm_head_;
}

std::vector<MoeLayer*> Decoder::moe_layers() const {
  std::vector<MoeLayer*> result;
  for (const auto& layer : layers_) result.push_back(layer->moe());
  return result;
}

const DecoderLayer& Decoder::layer(int64_t index) const {
  return *layers_.at(index);
}

}  // namespace furlong
