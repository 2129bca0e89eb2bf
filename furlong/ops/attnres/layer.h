#pragma once

// Attention residuals as the decoder uses them: the learned read, and the exact bookkeeping of blocks and prefix.

#include <string>
#include <vector>

#include "furlong/ops/attnres/attnres.h"
#include "furlong/ops/common/param_spec.h"

namespace furlong {

/// The parameters of one read: a norm weight [D] and a pseudo-query [1, D] that starts at zero (mean of the sources).
class AttnResRead {
 public:
  AttnResRead(int64_t hidden_size, double eps) : hidden_size_(hidden_size), eps_(eps) {}
  /// `stem` + "_norm.weight" and `stem` + "_proj.weight", e.g. stem "model.layers.3.mlp_res".
  void declare(ParamList& list, const std::string& stem);
  /// `mean_weight_S`, if not null, receives the mean weight of each source over the tokens.
  at::Tensor forward(const std::vector<at::Tensor>& sources_ND, at::Tensor* mean_weight_S) const;

 private:
  int64_t hidden_size_;
  double eps_;
  at::Tensor norm_;  // [D]
  at::Tensor proj_;  // [1, D]
};

/// The residual stream of one forward pass. Source 0 is the token embedding, sealed at layer 0; a block sum holds the
/// sub-layer outputs of `block_size` decoder layers. Sealed tensors are never written again.
///
///   for layer L:  h  = stream.read(attention_read)     (layer 0: the embedding itself)
///                 stream.seal_before(L)                raw prefix sealed where L % block_size == 0
///                 stream.add(attention(norm(h)))
///                 h2 = stream.read(mlp_read);  stream.add(mlp(norm(h2)))
///   at the end:   x  = stream.read(output_read)
class ResidualStream {
 public:
  ResidualStream(at::Tensor embedding_ND, int64_t block_size)
      : block_size_(block_size), prefix_(std::move(embedding_ND)) {}
  /// A stream in the middle of its way, from blocks() and prefix() of another.
  ResidualStream(std::vector<at::Tensor> blocks_ND, at::Tensor prefix_ND, int64_t block_size)
      : block_size_(block_size), blocks_(std::move(blocks_ND)), prefix_(std::move(prefix_ND)) {}

  const std::vector<at::Tensor>& blocks() const { return blocks_; }
  const at::Tensor& prefix() const { return prefix_; }

  at::Tensor read(const AttnResRead& read, at::Tensor* mean_weight_S) const;
  void seal_before(int64_t layer);
  void add(const at::Tensor& output_ND);

 private:
  int64_t block_size_;
  std::vector<at::Tensor> blocks_;
  at::Tensor prefix_;  // undefined right after a seal
};

}  // namespace furlong
