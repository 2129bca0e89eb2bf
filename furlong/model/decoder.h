#pragma once

// The decoder: one forward for training, prefill, chunked prefill and decode.
//   N packed tokens   D hidden   V vocabulary   S state slots

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "furlong/model/config.h"
#include "furlong/ops/common/forward_context.h"
#include "furlong/ops/common/param_spec.h"
#include "furlong/ops/common/sequence_layout.h"

namespace furlong {

class DecoderState;
class DecoderLayer;
class AttnResRead;
class MoeLayer;

/// What one forward did, layer by layer, if it was asked to say.
struct ForwardRecord {
  bool keep_stream = false;           // set by the caller: fills stream_ND and blocks_ND
  std::vector<at::Tensor> stream_ND;  // the residual stream's running sum after each layer
  std::vector<at::Tensor> blocks_ND;  // sealed blocks of attention residuals
  std::vector<LayerRecord> layers;
  at::Tensor output_depth_weight_S;  // mean weights of the last attention-residual read
};

struct ForwardOptions {
  Numerics numerics = Numerics::kFast;
  bool training = false;   // count the balance histogram
  bool recompute = false;  // keep only each layer's inputs for backward and run the layer again there
  ForwardRecord* record = nullptr;
  const std::vector<at::Tensor>* forced_expert_ids = nullptr;  // per layer, [N, A] or undefined
};

class Decoder {
 public:
  /// Describes the model; no tensor is allocated until initialize(), so that models of any size can be counted.
  explicit Decoder(const ModelConfig& config);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  const ModelConfig& config() const { return config_; }
  const std::vector<Param>& params() const { return list_.params(); }

  /// Allocates every parameter (fp32 policy: fp32; compute policy: `dtype`) and draws its initial value. `seed` and the
  /// parameter's name alone decide the values. requires_grad for trainable ones when `trainable`.
  void initialize(uint64_t seed, at::ScalarType dtype, at::Device device, bool trainable);
  /// The same without values: for weights that will be loaded. Not trainable.
  void allocate(at::ScalarType dtype, at::Device device);
  /// Compute dtype of activations: embeddings are cast to it. fp32 masters under bf16 compute: initialize(fp32) and
  /// set_compute_dtype(kBFloat16).
  void set_compute_dtype(at::ScalarType dtype) { compute_dtype_ = dtype; }
  at::ScalarType compute_dtype() const { return compute_dtype_; }
  at::Device device() const;

  /// Hidden states after the final norm, [N, D]. With `state` the layout must carry slots and past lengths; states are
  /// updated in place.
  at::Tensor forward(const at::Tensor& tokens_N, const SequenceLayout& layout, DecoderState* state,
                     const ForwardOptions& options) const;
  /// fp32 logits [M, V] of some hidden states.
  at::Tensor logits(const at::Tensor& hidden_MD, Numerics numerics = Numerics::kFast) const;
  /// The output projection, for the chunked loss.
  const at::Tensor& head_weight() const;

  /// MoE blocks by layer; null where the layer is dense.
  std::vector<MoeLayer*> moe_layers() const;
  const DecoderLayer& layer(int64_t index) const;

 private:
  at::Tensor embed(const at::Tensor& tokens_N, const SequenceLayout& layout) const;

  ModelConfig config_;
  ParamList list_;
  at::ScalarType compute_dtype_ = at::kFloat;
  at::Tensor embedding_, final_norm_, lm_head_;
  std::vector<std::unique_ptr<DecoderLayer>> layers_;
  std::unique_ptr<AttnResRead> output_read_;
};

}  // namespace furlong
