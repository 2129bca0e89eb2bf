#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

namespace furlong {

using Json = nlohmann::json;
/// Keeps keys in the order in which they were written.
using OrderedJson = nlohmann::ordered_json;

/// Parses text; FormatError names `where` (a file, a request) and the position of the fault.
Json parse_json(std::string_view text, const std::string& where);
Json read_json(const std::filesystem::path& path);
void write_json_atomic(const std::filesystem::path& path, const OrderedJson& value);

}  // namespace furlong
