#pragma once

#include <string>
#include <string_view>

namespace furlong {

/// SHA-256 (FIPS 180-4) as 64 hex digits.
std::string sha256_hex(std::string_view data);

}  // namespace furlong
