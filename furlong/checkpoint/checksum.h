#pragma once

// A fast 64-bit checksum against damage on disk or on the way there. Not against forgery. No torch here.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace furlong {

/// Depends on the bytes alone, not on the number of threads. Any change of one 64-bit word changes it for certain, any
/// other with probability 1 - 2^-64.
uint64_t checksum64(std::span<const std::byte> bytes);

/// 16 hex digits.
std::string checksum_text(uint64_t checksum);

}  // namespace furlong
