#include "furlong/train/report/line_chart.h"

#include <algorithm>
#include <cmath>

#include "furlong/train/report/svg.h"

namespace furlong::report {
namespace {

constexpr double kLeft = 50, kRight = 14, kTop = 20, kBottom = 38;
constexpr double kLetterWidth = 6.2;  // of the 11-unit type, generous

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  void add(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

Scale make_scale(const Axis& axis, Range range, double from, double to, bool pad) {
  if (!(range.low <= range.high)) range = {axis.log ? 1.0 : 0.0, axis.log ? 10.0 : 1.0};
  if (axis.log) {
    if (pad) {
      range.low /= 1.08;
      range.high *= 1.08;
    }
  } else if (pad) {
    const double margin = 0.05 * (range.high - range.low);
    range.low = range.low >= 0 && range.low < 0.35 * range.high ? 0 : range.low - margin;
    range.high += margin;
  }
  if (axis.low) range.low = *axis.low;
  if (axis.high) range.high = *axis.high;
  return Scale(range.low, range.high, from, to, axis.log);
}

std::string polyline(const Series& series, const Scale& x, const Scale& y, bool log_x, bool log_y) {
  std::string data;
  bool pen_down = false;
  for (size_t i = 0; i < series.x.size(); ++i) {
    const bool drawn = std::isfinite(series.y[i]) && (!log_y || series.y[i] > 0) && (!log_x || series.x[i] > 0);
    if (drawn) data += (pen_down ? "L" : "M") + coordinate(x(series.x[i])) + " " + coordinate(y(series.y[i]));
    pen_down = drawn;
  }
  return data;
}

class Plot {
 public:
  Plot(const LineChart& chart, double width, double height)
      : chart_(chart), width_(width), height_(height), svg_(width, height, chart.label), x_(x_scale()), y_(y_scale()) {}

  std::string draw() {
    bands();
    grid();
    if (chart_.reference) reference();
    for (const Series& series : chart_.series) {
      const char* css_class = series.style == Series::Style::kFaint    ? "faint"
                              : series.style == Series::Style::kDashed ? "dashed"
                                                                       : "curve";
      svg_.path(polyline(series, x_, y_, chart_.x.log, chart_.y.log), css_class, "stroke:" + series.color);
    }
    for (const Mark& mark : chart_.marks) {
      const double at = std::isfinite(mark.y) ? y_(mark.y) : kTop + 4;
      svg_.mark(x_(mark.x), at, mark.severe ? "mark severe" : "mark", mark.tooltip);
    }
    return svg_.str();
  }

 private:
  Scale x_scale() const {
    Range range;
    for (const Series& series : chart_.series) {
      for (const double value : series.x) {
        if (!chart_.x.log || value > 0) range.add(value);
      }
    }
    return make_scale(chart_.x, range, kLeft, width_ - kRight, false);
  }
  Scale y_scale() const {
    Range range;
    for (const Series& series : chart_.series) {
      for (const double value : series.y) {
        if (!chart_.y.log || value > 0) range.add(value);
      }
    }
    if (chart_.reference) range.add(*chart_.reference);
    return make_scale(chart_.y, range, height_ - kBottom, kTop, true);
  }

  void bands() {
    for (size_t i = 0; i < chart_.bands.size(); ++i) {
      const Band& band = chart_.bands[i];
      const double from = x_(band.from), to = x_(band.to);
      if (i % 2 == 1) svg_.rect(from, kTop, to - from, height_ - kTop - kBottom, "band", "");
      if (i > 0) svg_.line(from, kTop, from, height_ - kBottom, "border");
      const bool fits = kLetterWidth * static_cast<double>(band.name.size()) < to - from;
      if (fits && chart_.bands.size() > 1) svg_.text((from + to) / 2, kTop - 7, band.name, "note", Anchor::kMiddle);
    }
  }

  void grid() {
    const double bottom = height_ - kBottom;
    for (const double tick : y_.ticks(5, chart_.y.unit)) {
      svg_.line(kLeft, y_(tick), width_ - kRight, y_(tick), "grid");
      svg_.text(kLeft - 6, y_(tick) + 4, format_number(tick, chart_.y.unit), "tick", Anchor::kEnd);
    }
    double free_from = 0;
    for (const double tick : x_.ticks(width_ > 700 ? 10 : 5, chart_.x.unit)) {
      const std::string name = format_number(tick, chart_.x.unit);
      const double half = kLetterWidth * static_cast<double>(name.size()) / 2;
      svg_.line(x_(tick), bottom, x_(tick), bottom + 4, "axis");
      const double at = std::min(x_(tick), width_ - half);
      if (at - half < free_from) continue;
      svg_.text(at, bottom + 16, name, "tick", Anchor::kMiddle);
      free_from = at + half + 4;
    }
    svg_.line(kLeft, bottom, width_ - kRight, bottom, "axis");
    svg_.text((kLeft + width_ - kRight) / 2, height_ - 6, chart_.x.title, "note", Anchor::kMiddle);
    if (chart_.bands.size() < 2) svg_.text(kLeft, kTop - 7, chart_.y.title, "note");
  }

  void reference() {
    const double at = y_(*chart_.reference);
    svg_.line(kLeft, at, width_ - kRight, at, "reference");
    svg_.text(width_ - kRight, at - 4, chart_.reference_name, "note", Anchor::kEnd);
  }

  const LineChart& chart_;
  double width_, height_;
  Svg svg_;
  Scale x_, y_;
};

}  // namespace

std::string LineChart::render(double width, double height) const {
  return Plot(*this, width, height).draw();
}

Series thin_out(const Series& series, size_t limit) {
  const size_t count = series.x.size();
  if (count <= limit) return series;
  Series thin = series;
  thin.x.clear();
  thin.y.clear();
  const size_t stretches = limit / 2;
  for (size_t s = 0; s < stretches; ++s) {
    const size_t first = count * s / stretches, last = count * (s + 1) / stretches;
    size_t low = last, high = last;
    for (size_t i = first; i < last; ++i) {
      if (!std::isfinite(series.y[i])) continue;
      if (low == last || series.y[i] < series.y[low]) low = i;
      if (high == last || series.y[i] > series.y[high]) high = i;
    }
    if (low == last) low = high = first;  // nothing finite: keep the gap
    for (const size_t i : {std::min(low, high), std::max(low, high)}) {
      if (!thin.x.empty() && low == high && thin.x.back() == series.x[i]) continue;
      thin.x.push_back(series.x[i]);
      thin.y.push_back(series.y[i]);
    }
  }
  return thin;
}

}  // namespace furlong::report
