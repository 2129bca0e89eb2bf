#pragma once

// RFC 4648 base64 with padding, the alphabet of tiktoken's rank files.

#include <optional>
#include <string>
#include <string_view>

namespace furlong {

std::string base64_encode(std::string_view bytes);
/// Nothing when `text` is no padded base64.
std::optional<std::string> base64_decode(std::string_view text);

}  // namespace furlong
