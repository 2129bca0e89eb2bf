#include "furlong/model/hf_folder.h"

#include <fmt/format.h>

#include "furlong/base/error.h"

namespace furlong {

namespace {

namespace fs = std::filesystem;

/// A key of the text model's table, or of the one around it; null when it stands in neither.
Json find_key(const Json& config, const char* key) {
  for (const Json* table : {config.contains("text_config") ? &config["text_config"] : nullptr, &config}) {
    if (table == nullptr || !table->is_object()) continue;
    const auto found = table->find(key);
    if (found != table->end() && !found->is_null()) return *found;
  }
  return nullptr;
}

Json read_object(const fs::path& path) {
  Json value = read_json(path);
  if (!value.is_object()) throw ConfigError(path.string() + ": must be a JSON object");
  return value;
}

int64_t read_id(const Json& value, int64_t vocab_size, const fs::path& file) {
  // Numbers beyond 63 bits are unsigned in the parser's eyes and become negative here.
  const int64_t id = value.is_number_integer() ? value.get<int64_t>() : -1;
  if (id >= 0 && id < vocab_size) return id;
  throw ConfigError(fmt::format("{}: key 'eos_token_id' must hold ids below {}, got {}", file.string(), vocab_size,
                                value.dump(-1, ' ', true)));
}

}  // namespace

Json quantization_of(const fs::path& folder) {
  const Json found = find_key(read_object(folder / "config.json"), "quantization_config");
  return found.is_object() ? found : Json();
}

std::vector<int64_t> stop_ids_of(const fs::path& folder, int64_t vocab_size) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    const fs::path file = folder / name;
    if (!fs::exists(file)) continue;
    const Json value = find_key(read_object(file), "eos_token_id");
    if (value.is_null()) continue;
    std::vector<int64_t> ids;
    if (!value.is_array()) return {read_id(value, vocab_size, file)};
    for (const Json& id : value) ids.push_back(read_id(id, vocab_size, file));
    return ids;
  }
  return {};
}

}  // namespace furlong
