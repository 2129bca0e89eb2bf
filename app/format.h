#pragma once

// Numbers for people.

#include <fmt/format.h>

#include <string>

namespace furlong::app {

inline std::string human(double value, double step, const char* const (&units)[5]) {
  size_t unit = 0;
  while (value >= step && unit + 1 < 5) {
    value /= step;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", value, unit == 0 ? 0 : 2, units[unit]);
}

/// Decimal units, as the sizes of published models are given.
inline std::string human_bytes(double bytes) {
  static constexpr const char* kUnits[5] = {"B", "kB", "MB", "GB", "TB"};
  return human(bytes, 1000.0, kUnits);
}

inline std::string human_count(double count) {
  static constexpr const char* kUnits[5] = {"", "k", "M", "B", "T"};
  return human(count, 1000.0, kUnits);
}

}  // namespace furlong::app
