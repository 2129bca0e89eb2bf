#pragma once

// Axes: from values to places on the page, ticks at round values, and numbers as a reader wants them.

#include <string>
#include <vector>

namespace furlong::report {

enum class Unit {
  kPlain,    // 0.25, 1,200
  kCount,    // 12 k, 3.4 M
  kBytes,    // 16 KiB, 2 GiB
  kContext,  // token positions in powers of two: 512, 4K, 1M
  kPercent,  // a share of one
};

std::string format_number(double value, Unit unit);

/// Maps [low, high] to [from, to] on the page. A logarithmic scale needs low > 0.
class Scale {
 public:
  Scale(double low, double high, double from, double to, bool log);

  double operator()(double value) const;  // clamped to the ends
  double low() const { return low_; }
  double high() const { return high_; }
  /// Round values inside the range, about `count` of them; powers of two for units that count in them.
  std::vector<double> ticks(int count, Unit unit) const;

 private:
  double low_, high_, from_, to_;
  bool log_;
};

}  // namespace furlong::report
