#include "furlong/base/json.h"

#include "furlong/base/error.h"
#include "furlong/base/file.h"

namespace furlong {

Json parse_json(std::string_view text, const std::string& where) {
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    throw FormatError(where + ": not valid JSON: " + error.what());
  }
}

Json read_json(const std::filesystem::path& path) {
  return parse_json(read_file(path), path.string());
}

void write_json_atomic(const std::filesystem::path& path, const OrderedJson& value) {
  write_file_atomic(path, value.dump(2) + "\n");
}

}  // namespace furlong
