#pragma once

// One decoder layer: token mixer (KDA or MLA) and feed-forward (dense or experts), each behind its norm, on a residual
// stream that is plain or mixes depth by attention residuals.

#include <memory>
#include <optional>
#include <string>

#include "furlong/model/config.h"
#include "furlong/model/state.h"
#include "furlong/ops/attnres/layer.h"
#include "furlong/ops/kda/layer.h"
#include "furlong/ops/mla/layer.h"
#include "furlong/ops/moe/layer.h"
#include "furlong/ops/situ/layer.h"

namespace furlong {

/// Layers of a config, as the operators' modules want them described.
Activation activation_of(const ModelConfig& config);
KdaLayerConfig kda_layer_of(const ModelConfig& config);
MlaLayerConfig mla_layer_of(const ModelConfig& config);
MoeLayerConfig moe_layer_of(const ModelConfig& config);

class DecoderLayer {
 public:
  DecoderLayer(const ModelConfig& config, int64_t index);

  void declare(ParamList& list, const std::string& prefix);
  /// Reads and extends the stream. `state` may be null.
  void forward(ResidualStream& stream, const SequenceLayout& layout, DecoderState* state,
               const ForwardContext& context) const;

  int64_t index() const { return index_; }
  const KdaLayer* kda() const { return kda_ ? &*kda_ : nullptr; }
  const MlaLayer* mla() const { return mla_ ? &*mla_ : nullptr; }
  MoeLayer* moe() const { return moe_.get(); }
  /// The layer's own parameters, in the order of declare().
  const std::vector<at::Tensor*>& tensors() const { return tensors_; }

 private:
  at::Tensor mix_tokens(const at::Tensor& x_ND, const SequenceLayout& layout, DecoderState* state,
                        const ForwardContext& context) const;
  at::Tensor feed_forward(const at::Tensor& x_ND, const SequenceLayout& layout, const ForwardContext& context) const;

  int64_t index_;
  double norm_eps_;
  int64_t hidden_size_;
  std::optional<KdaLayer> kda_;
  std::optional<MlaLayer> mla_;
  std::optional<GluMlp> mlp_;
  std::unique_ptr<MoeLayer> moe_;
  std::optional<AttnResRead> attention_read_, mlp_read_;
  at::Tensor input_norm_, post_norm_;  // [D]
  std::vector<at::Tensor*> tensors_;
};

}  // namespace furlong
