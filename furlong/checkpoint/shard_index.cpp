#include "furlong/checkpoint/shard_index.h"

#include <set>
#include <string_view>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/json.h"
#include "furlong/base/json_fault.h"

namespace furlong {

namespace {

/// Index objects are flat: {"metadata": {...}, "weight_map": {name: file}}. Anything deeper is not an index.
constexpr int kMaxDepth = 4;

/// The parser keeps the last of two equal keys; an index that says two things of a tensor is refused instead.
Json parse_without_duplicates(std::string_view text, const std::string& file) {
  std::vector<std::set<std::string>> keys(kMaxDepth + 1);
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth >= kMaxDepth) throw FormatError(file + ": nested too deeply for a shard index");
    if (event == Json::parse_event_t::object_start) keys[depth + 1].clear();
    if (event == Json::parse_event_t::key && !keys[depth].insert(parsed.get<std::string>()).second) {
      throw FormatError(file + ": '" + parsed.get<std::string>() + "' stands twice");
    }
    return true;
  };
  try {
    return Json::parse(text, watch);
  } catch (const Json::exception& error) {
    throw FormatError(file + ": not valid JSON: " + json_fault(error));
  }
}

bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

}  // namespace

std::map<std::string, std::string> read_shard_index(const std::filesystem::path& path) {
  const std::string file = path.string();
  const Json index = parse_without_duplicates(read_file(path), file);
  const auto weight_map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || weight_map == index.end() || !weight_map->is_object()) {
    throw FormatError(file + ": needs an object 'weight_map' of tensor names and shard files");
  }
  std::map<std::string, std::string> shard_of;
  for (const auto& [name, shard] : weight_map->items()) {
    if (!shard.is_string() || !is_plain_file_name(shard.get_ref<const std::string&>())) {
      throw FormatError(file + ": tensor '" + name + "': the shard must be a file name without a folder, got " +
                        shard.dump(-1, ' ', true));
    }
    shard_of.emplace(name, shard.get<std::string>());
  }
  if (shard_of.empty()) throw FormatError(file + ": 'weight_map' is empty");
  return shard_of;
}

}  // namespace furlong
