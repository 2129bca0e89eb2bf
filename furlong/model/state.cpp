#include "furlong/model/state.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "furlong/base/rng.h"
#include "furlong/base/shape.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/model/decoder.h"
#include "furlong/model/decoder_layer.h"

namespace furlong {

namespace {

constexpr char kFormat[] = "furlong-sequence-state-1";

std::string tensor_name(size_t index) {
  return fmt::format("state.{:05}", index);
}

uint64_t read_number(const std::map<std::string, std::string>& metadata, const std::string& key,
                     const std::filesystem::path& path) {
  const auto found = metadata.find(key);
  uint64_t value = 0;
  if (found != metadata.end()) {
    const std::string& text = found->second;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec == std::errc() && result.ptr == text.data() + text.size()) return value;
  }
  throw FormatError(fmt::format("{}: metadata '{}' is missing or no number", path.string(), key));
}

}  // namespace

int64_t SequenceState::size_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

void SequenceState::save(const std::filesystem::path& path) const {
  NamedTensors named;
  for (size_t i = 0; i < tensors.size(); ++i) named.emplace_back(tensor_name(i), tensors[i]);
  write_tensors(path, named,
                {{"format", kFormat},
                 {"architecture", std::to_string(architecture)},
                 {"position", std::to_string(position)},
                 {"token_hash", std::to_string(token_hash)},
                 {"weight_version", std::to_string(weight_version)}});
}

SequenceState SequenceState::load(const std::filesystem::path& path) {
  const CheckpointReader reader(path);
  const auto metadata = reader.metadata();
  const auto format = metadata.find("format");
  if (format == metadata.end() || format->second != kFormat) {
    throw FormatError(path.string() + ": holds no sequence state");
  }
  SequenceState state;
  state.architecture = read_number(metadata, "architecture", path);
  state.position = static_cast<int64_t>(read_number(metadata, "position", path));
  state.token_hash = read_number(metadata, "token_hash", path);
  state.weight_version = read_number(metadata, "weight_version", path);
  const size_t count = reader.names().size();
  for (size_t i = 0; i < count; ++i) state.tensors.push_back(reader.tensor(tensor_name(i)));
  return state;
}

DecoderState::DecoderState(const Decoder& decoder, int64_t slots)
    : positions_(slots, 0),
      token_hashes_(slots, 0),
      architecture_(decoder.config().fingerprint()),
      device_(decoder.device()) {
  const int64_t num_layers = decoder.config().num_layers;
  kda_.resize(num_layers);
  mla_.resize(num_layers);
  for (int64_t i = 0; i < num_layers; ++i) {
    const DecoderLayer& layer = decoder.layer(i);
    if (layer.kda() != nullptr) kda_[i] = layer.kda()->allocate_state(slots, decoder.compute_dtype(), device_);
    if (layer.mla() != nullptr) mla_[i] = layer.mla()->allocate_state(slots, decoder.compute_dtype(), device_);
  }
}

void DecoderState::reset(int64_t slot) {
  for (auto& kda : kda_) {
    if (!kda) continue;
    kda->recurrent.pool_SHKV.select(0, slot).zero_();
    kda->conv.pool_STP.select(0, slot).zero_();
  }
  positions_[slot] = 0;
  token_hashes_[slot] = 0;
}

SequenceLayout DecoderState::layout(const std::vector<int64_t>& slots, const std::vector<int64_t>& lengths) const {
  std::vector<int64_t> past;
  for (const int64_t slot : slots) {
    check_argument(slot >= 0 && slot < num_slots(), "DecoderState",
                   fmt::format("slots: got {}, there are {}", slot, num_slots()));
    past.push_back(positions_[slot]);
  }
  return SequenceLayout::with_state(lengths, slots, past, device_);
}

void DecoderState::reserve(const SequenceLayout& layout) {
  check_argument(layout.has_state(), "DecoderState", "layout: has no state slots");
  int64_t tokens = 0;
  for (int64_t b = 0; b < layout.num_sequences(); ++b) {
    check_argument(layout.past(b) == positions_[layout.slot(b)], "DecoderState",
                   fmt::format("layout: slot {} has {} tokens, the layout says {}", layout.slot(b),
                               positions_[layout.slot(b)], layout.past(b)));
    tokens = std::max(tokens, layout.past(b) + layout.length(b));
  }
  for (auto& mla : mla_) {
    if (mla) mla->reserve(tokens);
  }
}

void DecoderState::advance(const SequenceLayout& layout, const at::Tensor& tokens_N) {
  const at::Tensor host_N = tokens_N.cpu().contiguous();
  const int64_t* tokens = host_N.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < layout.num_sequences(); ++b) {
    uint64_t& hash = token_hashes_[layout.slot(b)];
    for (int64_t n = layout.start(b); n < layout.start(b) + layout.length(b); ++n) {
      hash = mix64(hash ^ static_cast<uint64_t>(tokens[n]));
    }
    positions_[layout.slot(b)] += layout.length(b);
  }
}

SequenceState DecoderState::snapshot(int64_t slot) const {
  SequenceState state;
  state.architecture = architecture_;
  state.position = positions_[slot];
  state.token_hash = token_hashes_[slot];
  state.weight_version = weight_version;
  for (size_t i = 0; i < kda_.size(); ++i) {
    if (kda_[i]) {
      state.tensors.push_back(kda_[i]->recurrent.pool_SHKV.select(0, slot).clone());
      state.tensors.push_back(kda_[i]->conv.pool_STP.select(0, slot).clone());
    } else {
      state.tensors.push_back(mla_[i]->pool_SCE.select(0, slot).slice(0, 0, positions_[slot]).clone());
    }
  }
  return state;
}

void DecoderState::restore(int64_t slot, const SequenceState& state) {
  if (state.architecture != architecture_) {
    throw FormatError(fmt::format("sequence state: made by another architecture ({:016x}, this model is {:016x})",
                                  state.architecture, architecture_));
  }
  std::vector<at::Tensor> places;
  for (size_t i = 0; i < kda_.size(); ++i) {
    if (kda_[i]) {
      places.push_back(kda_[i]->recurrent.pool_SHKV.select(0, slot));
      places.push_back(kda_[i]->conv.pool_STP.select(0, slot));
    } else {
      mla_[i]->reserve(state.position);
      places.push_back(mla_[i]->pool_SCE.select(0, slot).slice(0, 0, state.position));
    }
  }
  if (places.size() != state.tensors.size()) {
    throw FormatError(fmt::format("sequence state: has {} tensors, need {}", state.tensors.size(), places.size()));
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const at::Tensor& saved = state.tensors[i];
    if (saved.sizes() == places[i].sizes() && saved.scalar_type() == places[i].scalar_type()) continue;
    throw FormatError(fmt::format("sequence state: {} is {} {}, need {} {}", tensor_name(i), shape_text(saved.sizes()),
                                  c10::toString(saved.scalar_type()), shape_text(places[i].sizes()),
                                  c10::toString(places[i].scalar_type())));
  }
  for (size_t i = 0; i < places.size(); ++i) places[i].copy_(state.tensors[i]);
  positions_[slot] = state.position;
  token_hashes_[slot] = state.token_hash;
}

int64_t DecoderState::size_bytes() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < kda_.size(); ++i) {
    if (kda_[i]) bytes += kda_[i]->recurrent.pool_SHKV.nbytes() + kda_[i]->conv.pool_STP.nbytes();
    if (mla_[i]) bytes += mla_[i]->pool_SCE.nbytes();
  }
  return bytes;
}

}  // namespace furlong
