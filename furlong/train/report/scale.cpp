#include "furlong/train/report/scale.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string_view>

namespace furlong::report {
namespace {

/// Up to `digits` significant digits, without trailing zeros.
std::string significant(double value, int digits) {
  char text[64];
  const double magnitude = std::abs(value);
  const int integer_digits = magnitude >= 1 ? static_cast<int>(std::floor(std::log10(magnitude))) + 1 : 0;
  if (magnitude != 0 && magnitude < 1e-4) {
    std::snprintf(text, sizeof text, "%.0e", value);
    return text;
  }
  const int leading_zeros =
      magnitude > 0 && magnitude < 1 ? static_cast<int>(-std::floor(std::log10(magnitude))) - 1 : 0;
  std::snprintf(text, sizeof text, "%.*f", std::clamp(digits - integer_digits + leading_zeros, 0, 8), value);
  std::string out = text;
  if (out.find('.') != std::string::npos) {
    while (out.back() == '0') out.pop_back();
    if (out.back() == '.') out.pop_back();
  }
  return out;
}

std::string with_prefix(double value, double base, std::string_view space, const std::array<const char*, 5>& names) {
  size_t power = 0;
  while (std::abs(value) >= base * 0.9995 && power + 1 < names.size()) {
    value /= base;
    ++power;
  }
  std::string out = significant(value, 3);
  if (names[power][0] != '\0') out += std::string(space) + names[power];
  return out;
}

std::vector<double> log_ticks(double low, double high, int count, double base) {
  std::vector<double> ticks;
  const double span = std::log(high / low) / std::log(base);
  const std::vector<double> within =
      base == 10 && span < count / 2.0 ? std::vector<double>{1, 2, 5} : std::vector<double>{1};
  const auto stride = static_cast<int>(std::max(1.0, std::ceil(span / count)));
  const auto first = static_cast<int>(std::floor(std::log(low) / std::log(base)));
  for (int power = first; std::pow(base, power) <= high * 1.0001; ++power) {
    if (((power % stride) + stride) % stride != 0) continue;
    for (const double factor : within) {
      const double tick = factor * std::pow(base, power);
      if (tick >= low * 0.9999 && tick <= high * 1.0001) ticks.push_back(tick);
    }
  }
  return ticks;
}

}  // namespace

std::string format_number(double value, Unit unit) {
  if (!std::isfinite(value)) return "not finite";
  switch (unit) {
    case Unit::kPlain:
      return significant(value, 3);
    case Unit::kCount:
      return with_prefix(value, 1000, "\u00a0", {"", "k", "M", "G", "T"});
    case Unit::kBytes:
      return with_prefix(value, 1024, "\u00a0", {"B", "KiB", "MiB", "GiB", "TiB"});
    case Unit::kContext:
      return with_prefix(value, 1024, "", {"", "K", "M", "G", "T"});
    case Unit::kPercent:
      return significant(100 * value, 3) + "%";
  }
  return "";
}

Scale::Scale(double low, double high, double from, double to, bool log)
    : low_(low), high_(high > low ? high : low + (low == 0 ? 1 : std::abs(low))), from_(from), to_(to), log_(log) {}

double Scale::operator()(double value) const {
  const double at =
      log_ ? std::log(std::max(value, low_) / low_) / std::log(high_ / low_) : (value - low_) / (high_ - low_);
  return from_ + std::clamp(at, 0.0, 1.0) * (to_ - from_);
}

std::vector<double> Scale::ticks(int count, Unit unit) const {
  const bool binary = unit == Unit::kBytes || unit == Unit::kContext;
  if (log_) return log_ticks(low_, high_, count, binary ? 2 : 10);
  const double raw = (high_ - low_) / count;
  const double power = binary ? std::exp2(std::floor(std::log2(raw))) : std::pow(10, std::floor(std::log10(raw)));
  double step = binary ? 2 * power : 10 * power;
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (!binary && raw <= factor * power * 1.0001) {
      step = factor * power;
      break;
    }
  }
  std::vector<double> ticks;
  for (double i = std::ceil(low_ / step - 1e-9); i * step <= high_ + step * 1e-9; ++i)
    ticks.push_back(i * step + 0.0);  // + 0: never -0
  return ticks;
}

}  // namespace furlong::report
