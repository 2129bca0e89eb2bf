#include "furlong/model/checkpoint_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "furlong/base/shape.h"
#include "furlong/checkpoint/checksum.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/model/hf_folder.h"
#include "furlong/model/hf_names.h"

namespace furlong {

namespace {

constexpr std::string_view kWeight = ".weight", kPacked = ".weight_packed", kScale = ".weight_scale";
constexpr int64_t kCodesPerByte = 2, kScaleGroup = 32;

/// The checkpoint's tensors by today's spelling.
class Spellings {
 public:
  Spellings(const CheckpointReader& reader, const std::string& where) {
    for (std::string& name : reader.names()) {
      const auto [found, fresh] = stored_.emplace(canonical_name(name), name);
      if (fresh) continue;
      throw FormatError(
          fmt::format("{}: tensors '{}' and '{}' are one under two spellings", where, found->second, name));
    }
    // The checkpoint decides, not the config: with every mechanism of Kimi-K3 off its names keep their prefix.
    prefix_ = stored_.count(std::string(kTextPrefix) + "model.embed_tokens.weight") > 0 ? kTextPrefix : "";
  }

  const std::string& prefix() const { return prefix_; }
  /// As the checkpoint spells it; null when it has none, or it was taken before.
  const std::string* take(const std::string& name) {
    const auto found = stored_.find(name);
    if (found == stored_.end() || !used_.emplace(found->first, true).second) return nullptr;
    return &found->second;
  }
  bool holds(const std::string& name) const { return stored_.count(name) > 0; }
  std::vector<std::string> left() const {
    std::vector<std::string> names;
    for (const auto& [name, stored] : stored_) {
      if (used_.count(name) == 0) names.push_back(stored);
    }
    return names;
  }

 private:
  std::map<std::string, std::string> stored_;
  std::map<std::string, bool> used_;
  std::string prefix_;
};

std::string swap_ending(const std::string& name, std::string_view from, std::string_view to) {
  return name.substr(0, name.size() - from.size()) + std::string(to);
}

class Matcher {
 public:
  Matcher(const CheckpointReader& reader, const std::string& where)
      : reader_(reader), where_(where), names_(reader, where) {}

  void match(const Param& param) {
    const std::vector<std::string> names = published_names(param.spec);
    for (size_t i = 0; i < names.size(); ++i) {
      const std::string name = names_.prefix() + names[i];
      ParamPlace place{&param, param.spec.stacked() ? static_cast<int64_t>(i) : -1, "", ""};
      if (param.spec.routed_expert && !names_.holds(name) && names_.holds(swap_ending(name, kWeight, kPacked))) {
        match_packed(place, name);
      } else {
        match_plain(place, name);
      }
      map_.places.push_back(std::move(place));
    }
  }

  CheckpointMap finish() {
    const bool nested = !names_.prefix().empty();
    for (std::string& name : names_.left()) {
      if (!nested || !is_carried(name)) refuse_unknown(name);
      map_.carried.push_back(std::move(name));
    }
    return std::move(map_);
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const { throw FormatError(where_ + ": " + why); }

  std::string need(const std::string& name) {
    const std::string* stored = names_.take(name);
    if (stored == nullptr) refuse(fmt::format("tensor '{}' is missing, config.json asks for it", name));
    return *stored;
  }

  void match_plain(ParamPlace& place, const std::string& name) {
    place.stored = need(name);
    const ParamSpec& spec = place.param->spec;
    const std::vector<int64_t> shape = reader_.shape(place.stored);
    if (!accepts_shape(spec, shape)) {
      std::vector<int64_t> asked = spec.published_shape.empty() ? spec.shape : spec.published_shape;
      if (spec.stacked()) asked.erase(asked.begin());
      refuse(fmt::format("tensor '{}' is {}, config.json asks for {}", place.stored, shape_text(shape),
                         shape_text(asked)));
    }
    const std::string dtype = reader_.dtype(place.stored);
    if (dtype != "BF16" && dtype != "F32" && dtype != "F16" && dtype != "F64") {
      refuse(fmt::format("tensor '{}' is of dtype {}, need BF16, F16, F32 or F64", place.stored, dtype));
    }
  }

  void match_packed(ParamPlace& place, const std::string& name) {
    place.stored = need(swap_ending(name, kWeight, kPacked));
    place.scale = need(swap_ending(name, kWeight, kScale));
    const std::vector<int64_t>& shape = place.param->spec.shape;
    const int64_t out = shape[1], in = shape[2];
    if (in % kScaleGroup != 0) {
      refuse(fmt::format("tensor '{}': rows of {} values cannot be packed in groups of {}", place.stored, in,
                         kScaleGroup));
    }
    check_bytes(place.stored, {out, in / kCodesPerByte});
    check_bytes(place.scale, {out, in / kScaleGroup});
  }

  void check_bytes(const std::string& name, const std::vector<int64_t>& asked) const {
    const std::vector<int64_t> shape = reader_.shape(name);
    const std::string dtype = reader_.dtype(name);
    if (shape == asked && dtype == "U8") return;
    refuse(fmt::format("tensor '{}' is {} {}, config.json asks for U8 {}", name, dtype, shape_text(shape),
                       shape_text(asked)));
  }

  [[noreturn]] void refuse_unknown(const std::string& name) const {
    std::vector<std::string> known;
    for (const ParamPlace& place : map_.places) known.push_back(place.stored);
    const std::string close = closest_word(name, known);
    refuse(fmt::format("tensor '{}' has no place in the architecture of config.json{}", name,
                       close.empty() ? "" : fmt::format(" (nearest name: '{}')", close)));
  }

  const CheckpointReader& reader_;
  const std::string& where_;
  Spellings names_;
  CheckpointMap map_;
};

/// Two tensors a weight, codes and scales, are this layout and no other; a config that says otherwise, or nothing, may
/// mean another order of the codes.
void check_format(const Json& quantization, const std::string& where) {
  constexpr const char* kFormat = "mxfp4-pack-quantized";
  const Json format = quantization.is_object() && quantization.contains("format") ? quantization["format"] : Json();
  if (format == kFormat) return;
  throw FormatError(
      fmt::format("{}: experts are packed, but key 'quantization_config.format' of config.json is {}, need {}", where,
                  format.is_null() ? "missing" : format.dump(), kFormat));
}

void append(std::string* text, const std::string& part) {
  *text += std::to_string(part.size()) + ':' + part;
}

}  // namespace

bool CheckpointMap::packed() const {
  return std::any_of(places.begin(), places.end(), [](const ParamPlace& place) { return !place.scale.empty(); });
}

CheckpointMap map_checkpoint(const Decoder& decoder, const CheckpointReader& reader,
                             const std::filesystem::path& folder) {
  const std::string where = folder.string();
  Matcher matcher(reader, where);
  for (const Param& param : decoder.params()) matcher.match(param);
  CheckpointMap map = matcher.finish();
  if (map.packed()) check_format(quantization_of(folder), where);
  return map;
}

std::vector<GroupReport> describe_checkpoint(const ModelConfig& config, const CheckpointReader& reader,
                                             bool checksums) {
  std::map<std::string, GroupReport> groups;
  std::map<std::string, std::string> content;
  for (const std::string& name : reader.names()) {
    const std::string group = tensor_group(config, canonical_name(name));
    GroupReport& report = groups[group];
    const std::string dtype = reader.dtype(name);
    report.name = group;
    ++report.tensors;
    ++report.dtypes[dtype];
    report.bytes += reader.byte_size(name);
    if (!checksums) continue;
    std::string& text = content[group];
    append(&text, name);
    append(&text, dtype);
    append(&text, shape_text(reader.shape(name)));
    text += checksum_text(checksum64(reader.bytes(name)));
  }
  std::vector<GroupReport> result;
  for (auto& [name, report] : groups) {
    if (checksums) report.checksum = checksum_text(checksum64(std::as_bytes(std::span(content[name]))));
    result.push_back(std::move(report));
  }
  return result;
}

}  // namespace furlong
