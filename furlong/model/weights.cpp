#include "furlong/model/weights.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <set>

#include "furlong/base/file.h"
#include "furlong/base/json.h"
#include "furlong/base/shape.h"
#include "furlong/checkpoint/named_tensors.h"

namespace furlong {

namespace {

std::string replace_index(const std::string& name, int64_t index) {
  const size_t place = name.find("{}");
  return name.substr(0, place) + std::to_string(index) + name.substr(place + 2);
}

}  // namespace

std::vector<PublishedTensor> published_tensors(const ModelConfig& config, const Param& param) {
  const std::string prefix = config.has_k3_mechanism() ? "language_model." : "";
  const ParamSpec& spec = param.spec;
  if (!spec.stacked()) {
    return {{prefix + spec.name, spec.published_shape.empty() ? spec.shape : spec.published_shape, -1}};
  }
  const std::vector<int64_t> shape(spec.shape.begin() + 1, spec.shape.end());
  std::vector<PublishedTensor> result;
  for (int64_t index = 0; index < spec.shape[0]; ++index) {
    result.push_back(
        {prefix + replace_index(spec.name, index), spec.published_shape.empty() ? shape : spec.published_shape, index});
  }
  return result;
}

void save_weights(const Decoder& decoder, const std::filesystem::path& folder, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  make_folders(folder);
  NamedTensors tensors;
  for (const Param& param : decoder.params()) {
    const at::Tensor value =
        param.spec.dtype == DtypePolicy::kFp32 ? param.tensor->detach() : param.tensor->detach().to(dtype);
    for (const PublishedTensor& published : published_tensors(decoder.config(), param)) {
      const at::Tensor part = published.index < 0 ? value : value.select(0, published.index);
      tensors.emplace_back(published.name, part.reshape(published.shape));
    }
  }
  write_tensors(folder / "model.safetensors", tensors, {{"format", "pt"}});
  OrderedJson config = decoder.config().to_hugging_face();
  const std::string stored = dtype == at::kBFloat16 ? "bfloat16" : "float32";
  (config.contains("text_config") ? config["text_config"] : config)["torch_dtype"] = stored;
  write_json_atomic(folder / "config.json", config);
}

namespace {

/// Names and shapes, from the files' headers alone: a config that does not fit is found before its size is allocated.
void check_tensors(const Decoder& decoder, const CheckpointReader& reader, const std::filesystem::path& folder) {
  std::set<std::string> expected;
  for (const Param& param : decoder.params()) {
    for (const PublishedTensor& published : published_tensors(decoder.config(), param)) {
      expected.insert(published.name);
      if (!reader.contains(published.name)) {
        throw FormatError(
            fmt::format("{}: tensor '{}' is missing, config.json asks for it", folder.string(), published.name));
      }
      const std::vector<int64_t> shape = reader.shape(published.name);
      if (shape != published.shape) {
        throw FormatError(fmt::format("{}: tensor '{}' is {}, config.json asks for {}", folder.string(), published.name,
                                      shape_text(shape), shape_text(published.shape)));
      }
    }
  }
  for (const std::string& name : reader.names()) {
    if (expected.count(name) > 0) continue;
    const std::vector<std::string> names(expected.begin(), expected.end());
    const std::string close = closest_word(name, names);
    throw FormatError(fmt::format("{}: tensor '{}' has no place in the architecture of config.json{}", folder.string(),
                                  name, close.empty() ? "" : fmt::format(" (nearest name: '{}')", close)));
  }
}

void copy_tensors(Decoder& decoder, const CheckpointReader& reader) {
  const at::NoGradGuard no_grad;
  for (const Param& param : decoder.params()) {
    check_argument(param.tensor->defined(), "load_weights", "decoder: not initialised");
    for (const PublishedTensor& published : published_tensors(decoder.config(), param)) {
      const at::Tensor place = published.index < 0 ? *param.tensor : param.tensor->select(0, published.index);
      place.copy_(reader.tensor(published.name).reshape(place.sizes()));
    }
  }
}

}  // namespace

void load_weights(Decoder& decoder, const std::filesystem::path& folder) {
  const CheckpointReader reader(folder);
  check_tensors(decoder, reader, folder);
  copy_tensors(decoder, reader);
}

void check_weights(const std::filesystem::path& folder) {
  check_tensors(Decoder(ModelConfig::load(folder)), CheckpointReader(folder), folder);
}

std::unique_ptr<Decoder> load_decoder(const std::filesystem::path& folder, at::ScalarType dtype, at::Device device) {
  auto decoder = std::make_unique<Decoder>(ModelConfig::load(folder));
  const CheckpointReader reader(folder);
  check_tensors(*decoder, reader, folder);
  decoder->allocate(dtype, device);
  copy_tensors(*decoder, reader);
  return decoder;
}

}  // namespace furlong
