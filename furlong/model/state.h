#pragma once

// What sequences remember: all layers' pools, and the state of one sequence as a value.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "furlong/model/config.h"
#include "furlong/ops/common/sequence_layout.h"
#include "furlong/ops/kda/state.h"
#include "furlong/ops/mla/state.h"

namespace furlong {

class Decoder;

/// All layers' state of one sequence. Nothing else holds memory of a sequence.
struct SequenceState {
  uint64_t architecture = 0;        // ModelConfig::fingerprint()
  int64_t position = 0;             // tokens consumed
  uint64_t token_hash = 0;          // over all tokens consumed, in order
  uint64_t weight_version = 0;      // of the weights that made it
  std::vector<at::Tensor> tensors;  // layer by layer: recurrent state and convolution tail, or latent cache rows

  int64_t size_bytes() const;
  /// Atomic; read back bit for bit. FormatError when the file is no such state or damaged.
  void save(const std::filesystem::path& path) const;
  static SequenceState load(const std::filesystem::path& path);
};

/// Slot-addressed pools of every layer.
class DecoderState {
 public:
  DecoderState(const Decoder& decoder, int64_t slots);

  int64_t num_slots() const { return static_cast<int64_t>(positions_.size()); }
  int64_t position(int64_t slot) const { return positions_[slot]; }
  uint64_t token_hash(int64_t slot) const { return token_hashes_[slot]; }
  /// Empties a slot: a fresh sequence.
  void reset(int64_t slot);
  /// Layout for `lengths[i]` new tokens of the sequence in slots[i].
  SequenceLayout layout(const std::vector<int64_t>& slots, const std::vector<int64_t>& lengths) const;
  /// Makes room for the call's tokens. Called by Decoder::forward.
  void reserve(const SequenceLayout& layout);
  /// Advances positions and hashes. Called by Decoder::forward.
  void advance(const SequenceLayout& layout, const at::Tensor& tokens_N);

  /// Copies of one slot's state, and back. The restored slot continues bit for bit. FormatError when the state is of
  /// another architecture.
  SequenceState snapshot(int64_t slot) const;
  void restore(int64_t slot, const SequenceState& state);
  int64_t size_bytes() const;

  KdaLayerState* kda(int64_t layer) { return kda_[layer] ? &*kda_[layer] : nullptr; }  // null where the layer is MLA
  LatentCache* mla(int64_t layer) { return mla_[layer] ? &*mla_[layer] : nullptr; }    // null where the layer is KDA
  uint64_t weight_version = 0;

 private:
  std::vector<std::optional<KdaLayerState>> kda_;
  std::vector<std::optional<LatentCache>> mla_;
  std::vector<int64_t> positions_;
  std::vector<uint64_t> token_hashes_;
  uint64_t architecture_ = 0;
  at::Device device_ = at::kCPU;
};

}  // namespace furlong
