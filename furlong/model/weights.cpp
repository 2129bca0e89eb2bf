#include "furlong/model/weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/equal.h>
#include <fmt/format.h>

#include <map>
#include <set>

#include "furlong/base/file.h"
#include "furlong/base/json.h"
#include "furlong/base/shape.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/model/checkpoint_map.h"
#include "furlong/ops/mxfp4/layout.h"
#include "furlong/ops/mxfp4/mxfp4.h"

namespace furlong {

namespace fs = std::filesystem;

namespace {

at::Tensor part_of(const Param& param, int64_t index) {
  return index < 0 ? *param.tensor : param.tensor->select(0, index);
}

/// Zeros behind the heads' values, as many as the stored shape has room for.
at::Tensor padded(const at::Tensor& value, int64_t numel) {
  return value.numel() < numel ? at::constant_pad_nd(value, {0, numel - value.numel()}) : value;
}

at::Tensor unpadded(const at::Tensor& stored, int64_t heads, const std::string& what) {
  const at::Tensor flat = stored.flatten();
  if (flat.numel() > heads && flat.slice(0, heads).ne(0).any().item<bool>()) {
    throw FormatError(fmt::format("{} holds {} values for {} heads, but what stands behind them is not zero", what,
                                  flat.numel(), heads));
  }
  return flat.slice(0, 0, heads);
}

/// Exact in bf16 and in fp32.
at::Tensor dequantized(const ParamPlace& place, const CheckpointReader& reader, const fs::path& folder,
                       at::ScalarType dtype) {
  const at::Tensor scale = reader.tensor(place.scale);
  check_mxfp4_scale(folder.string() + ": tensor '" + place.scale + "'", scale);
  return mxfp4_dequantize(reader.tensor(place.stored), scale, dtype);
}

int64_t product(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
}

}  // namespace

at::Tensor stored_form(const at::Tensor& value, const Param& param, const std::vector<int64_t>& shape,
                       at::ScalarType dtype) {
  const at::Tensor whole = is_a_log(param.spec) ? padded(value.flatten(), product(shape)) : value;
  return whole.to(dtype).contiguous().reshape(shape);
}

void save_weights(const Decoder& decoder, const fs::path& folder, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  make_folders(folder);
  NamedTensors tensors;
  for (const Param& param : decoder.params()) {
    const at::Tensor value =
        param.spec.dtype == DtypePolicy::kFp32 ? param.tensor->detach() : param.tensor->detach().to(dtype);
    for (const PublishedTensor& published : published_tensors(decoder.config(), param)) {
      const at::Tensor part = published.index < 0 ? value : value.select(0, published.index);
      tensors.emplace_back(published.name, stored_form(part, param, published.shape, part.scalar_type()));
    }
  }
  write_tensors(folder / "model.safetensors", tensors, {{"format", "pt"}});
  OrderedJson config = decoder.config().to_hugging_face();
  const std::string stored = dtype == at::kBFloat16 ? "bfloat16" : "float32";
  (config.contains("text_config") ? config["text_config"] : config)["torch_dtype"] = stored;
  write_json_atomic(folder / "config.json", config);
}

at::Tensor read_parameter(const ParamPlace& place, const CheckpointReader& reader, const fs::path& folder) {
  if (!place.scale.empty()) return dequantized(place, reader, folder, at::kBFloat16);
  const at::Tensor stored = reader.tensor(place.stored);
  if (!is_a_log(place.param->spec)) return stored;
  return unpadded(stored, place.param->spec.shape[0], fmt::format("{}: tensor '{}'", folder.string(), place.stored));
}

namespace {

void copy_tensors(const CheckpointMap& map, const CheckpointReader& reader, const fs::path& folder) {
  const at::NoGradGuard no_grad;
  for (const ParamPlace& place : map.places) {
    check_argument(place.param->tensor->defined(), "load_weights", "decoder: not initialised");
    const at::Tensor target = part_of(*place.param, place.index);
    target.copy_(read_parameter(place, reader, folder).reshape(target.sizes()));
  }
}

/// A value of the decoder on its way into the file it came from, which holds it under `name`. Undefined: as it is
/// there.
at::Tensor for_file(const ParamPlace& place, const std::string& name, const CheckpointReader& reader,
                    const fs::path& source) {
  const at::Tensor value = part_of(*place.param, place.index);
  if (!place.scale.empty()) {
    const at::Tensor wide = value.to(at::kCPU, at::kFloat);
    // Unchanged weights keep their bytes: writers differ in the scale of a block of zeros.
    if (at::equal(wide, dequantized(place, reader, source, at::kFloat))) return {};
    const auto [packed, scale] = mxfp4_quantize(wide);
    return name == place.scale ? scale : packed;
  }
  const std::string dtype = reader.dtype(name);
  if (value.scalar_type() != at::kFloat && dtype != "BF16") {
    throw UsageError(fmt::format("[export_weights] {}: is held as {}, the file has {}: load the decoder in fp32", name,
                                 c10::toString(value.scalar_type()), dtype));
  }
  return is_a_log(place.param->spec) ? padded(value, product(reader.shape(name))) : value;
}

}  // namespace

void load_weights(Decoder& decoder, const fs::path& folder) {
  const CheckpointReader reader(folder);
  copy_tensors(map_checkpoint(decoder, reader, folder), reader, folder);
}

void check_weights(const fs::path& folder) {
  const Decoder decoder(ModelConfig::load(folder));
  map_checkpoint(decoder, CheckpointReader(folder), folder);
}

std::unique_ptr<Decoder> load_decoder(const fs::path& folder, at::ScalarType dtype, at::Device device) {
  auto decoder = std::make_unique<Decoder>(ModelConfig::load(folder));
  const CheckpointReader reader(folder);
  const CheckpointMap map = map_checkpoint(*decoder, reader, folder);
  decoder->allocate(dtype, device);
  copy_tensors(map, reader, folder);
  return decoder;
}

void export_weights(const Decoder& decoder, const fs::path& source, const fs::path& folder) {
  const at::NoGradGuard no_grad;
  const CheckpointReader reader(source);
  const CheckpointMap map = map_checkpoint(decoder, reader, source);
  std::map<std::string, const ParamPlace*> place_of;
  for (const ParamPlace& place : map.places) {
    place_of[place.stored] = &place;
    if (!place.scale.empty()) place_of[place.scale] = &place;
  }
  std::set<fs::path> tensor_files;
  make_folders(folder);
  for (const fs::path& file : reader.files()) {
    tensor_files.insert(file.filename());
    write_tensors_like(file, folder / file.filename(), [&](const std::string& name) {
      const auto found = place_of.find(name);
      return found == place_of.end() ? at::Tensor() : for_file(*found->second, name, reader, source);
    });
  }
  for (const auto& entry : fs::directory_iterator(source)) {
    if (!entry.is_regular_file() || tensor_files.count(entry.path().filename()) > 0) continue;
    write_file_atomic(folder / entry.path().filename(), read_file(entry.path()));
  }
}

}  // namespace furlong
