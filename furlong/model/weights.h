#pragma once

// Model weights to and from checkpoint folders in the published form: config.json and safetensors files, single or in
// shards. Names: hf_names.h; which tensor fills what: checkpoint_map.h.

#include <filesystem>
#include <memory>
#include <vector>

#include "furlong/model/decoder.h"
#include "furlong/model/hf_names.h"

namespace furlong {

/// Writes config.json and model.safetensors below `folder`. Stacked experts are written under their published names.
/// `dtype`: of parameters with the compute policy (fp32 masters: kFloat keeps them exact).
void save_weights(const Decoder& decoder, const std::filesystem::path& folder, at::ScalarType dtype);

struct ParamPlace;
class CheckpointReader;

/// The value of a parameter (or of one index of it) as the checkpoint holds it: in its stored dtype, packed experts in
/// bf16 (exact), A_log without padding. FormatError for padding that is not zero; `folder` is named.
at::Tensor read_parameter(const ParamPlace& place, const CheckpointReader& reader, const std::filesystem::path& folder);
/// A parameter's value on its way into a file: contiguous, in `dtype` and `shape`, A_log padded with zeros.
at::Tensor stored_form(const at::Tensor& value, const Param& param, const std::vector<int64_t>& shape,
                       at::ScalarType dtype);

/// Writes the weights in the form of the checkpoint at `source`, file by file: names, spellings, order, dtypes, shapes
/// and padding as there; tensors that are carried (vision) and all other files byte for byte. With the weights that
/// were loaded from `source` every file is equal to its own. UsageError when the decoder holds a parameter in a dtype
/// narrower than the file's.
void export_weights(const Decoder& decoder, const std::filesystem::path& source, const std::filesystem::path& folder);

/// Fills every parameter of an initialised decoder. Strict: a missing, unknown or misshapen tensor is a FormatError
/// naming it; so is a padded A_log whose padding is not zero.
void load_weights(Decoder& decoder, const std::filesystem::path& folder);

/// Names and shapes of a folder's tensors against its config.json, from the files' headers alone: the same FormatError
/// as load_weights.
void check_weights(const std::filesystem::path& folder);

/// Reads config.json, builds the decoder in `dtype` (parameters with the fp32 policy: fp32) and loads the weights. Not
/// trainable.
std::unique_ptr<Decoder> load_decoder(const std::filesystem::path& folder, at::ScalarType dtype, at::Device device);

}  // namespace furlong
