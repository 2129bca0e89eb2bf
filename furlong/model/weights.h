#pragma once

// Model weights to and from checkpoint folders in the published form: config.json, model.safetensors (published names).

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "furlong/model/decoder.h"

namespace furlong {

/// A parameter, or one index of a stacked one, as the checkpoint has it.
struct PublishedTensor {
  std::string name;
  std::vector<int64_t> shape;
  int64_t index;  // into the stacked dimension; -1: the whole parameter
};
/// Kimi-K3 puts "language_model." in front of the text model's names; Kimi-Linear does not.
std::vector<PublishedTensor> published_tensors(const ModelConfig& config, const Param& param);

/// Writes config.json and model.safetensors below `folder`. Stacked experts are written under their published names.
/// `dtype`: of parameters with the compute policy (fp32 masters: kFloat keeps them exact).
void save_weights(const Decoder& decoder, const std::filesystem::path& folder, at::ScalarType dtype);

/// Fills every parameter of an initialised decoder. Strict: a missing, unknown or misshapen tensor is a FormatError
/// naming it.
void load_weights(Decoder& decoder, const std::filesystem::path& folder);

/// Names and shapes of a folder's tensors against its config.json, from the files' headers alone: the same FormatError
/// as load_weights.
void check_weights(const std::filesystem::path& folder);

/// Reads config.json, builds the decoder in `dtype` and loads the weights. Not trainable.
std::unique_ptr<Decoder> load_decoder(const std::filesystem::path& folder, at::ScalarType dtype, at::Device device);

}  // namespace furlong
