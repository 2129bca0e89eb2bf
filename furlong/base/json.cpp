#include "furlong/base/json.h"

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/json_fault.h"

namespace furlong {

Json parse_json(std::string_view text, const std::string& where) {
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    throw FormatError(where + ": not valid JSON: " + json_fault(error));
  }
}

std::string json_fault(const Json::exception& error) {
  const std::string text = error.what();
  const size_t end = text.find("] ");
  return text.starts_with("[json.") && end != std::string::npos ? text.substr(end + 2) : text;
}

Json read_json(const std::filesystem::path& path) {
  return parse_json(read_file(path), path.string());
}

void write_json_atomic(const std::filesystem::path& path, const OrderedJson& value) {
  write_file_atomic(path, value.dump(2) + "\n");
}

}  // namespace furlong
