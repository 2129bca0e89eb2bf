#include "furlong/train/report/heat_map.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "furlong/train/report/scale.h"
#include "furlong/train/report/svg.h"

namespace furlong::report {
namespace {

constexpr int kLevels = 20;
constexpr double kLetterWidth = 6.2;
constexpr const char* kLowColor = "var(--s1)";
constexpr const char* kHighColor = "var(--s2)";

/// -kLevels .. kLevels; negative: the low colour.
int level_of(Shade shade, double value) {
  const double depth = shade == Shade::kShare ? -value : std::clamp(value - 1, -1.0, 1.0);
  return static_cast<int>(std::lround(std::clamp(depth, -1.0, 1.0) * kLevels));
}

double widest(const std::vector<std::string>& names) {
  size_t letters = 0;
  for (const std::string& name : names) letters = std::max(letters, name.size());
  return kLetterWidth * static_cast<double>(letters);
}

class Picture {
 public:
  Picture(const HeatMap& map, double width)
      : map_(map),
        left_(map.row_names.empty() ? 0 : widest(map.row_names) + 6),
        right_(map.row_values.empty() ? 0 : widest(map.row_values) + 6),
        top_(map.column_names.empty() ? 0 : 18),
        width_(width),
        height_(top_ + map.row_height * static_cast<double>(map.cells.size()) + 1),
        svg_(width, height_, map.label) {
    for (const auto& row : map.cells) columns_ = std::max(columns_, row.size());
  }

  std::string draw() {
    svg_.rect(left_, top_, width_ - left_ - right_, height_ - top_, "field", "");
    fill();
    for (const double border : map_.borders) svg_.line(place(border), top_, place(border), height_, "border");
    for (size_t row = 0; row < map_.cells.size(); ++row) name_row(row);
    const double letters_fit =
        (width_ - left_ - right_) / static_cast<double>(std::max<size_t>(columns_, 1)) / kLetterWidth;
    for (size_t column = 0; column < map_.column_names.size() && column < columns_; ++column) {
      std::string name = map_.column_names[column];
      if (static_cast<double>(name.size()) > letters_fit) name = name.substr(0, name.find(' ', 6));
      svg_.text((edge(column) + edge(column + 1)) / 2, top_ - 6, name, "tick", Anchor::kMiddle);
    }
    return svg_.str();
  }

 private:
  double place(double x) const {
    if (map_.column_edges.empty()) {
      return left_ + (width_ - left_ - right_) * x / static_cast<double>(std::max<size_t>(columns_, 1));
    }
    const double low = map_.column_edges.front(), high = map_.column_edges.back();
    return left_ + (width_ - left_ - right_) * (x - low) / std::max(high - low, 1e-12);
  }
  double edge(size_t column) const {
    return place(map_.column_edges.empty() ? static_cast<double>(column) : map_.column_edges[column]);
  }
  double row_top(size_t row) const { return top_ + map_.row_height * static_cast<double>(row); }

  /// One path a shade: thousands of cells cost a dozen bytes each.
  void fill() {
    std::array<std::string, 2 * kLevels + 1> paths;
    for (size_t row = 0; row < map_.cells.size(); ++row) {
      const auto& cells = map_.cells[row];
      for (size_t first = 0; first < cells.size();) {
        size_t last = first + 1;
        const bool drawn = std::isfinite(cells[first]);
        const int level = drawn ? level_of(map_.shade, cells[first]) : 0;
        while (drawn && last < cells.size() && std::isfinite(cells[last]) && level_of(map_.shade, cells[last]) == level)
          ++last;
        if (drawn && level != 0) {
          paths[static_cast<size_t>(level + kLevels)] +=
              "M" + coordinate(edge(first)) + " " + coordinate(row_top(row)) + "H" + coordinate(edge(last)) + "V" +
              coordinate(row_top(row) + map_.row_height) + "H" + coordinate(edge(first)) + "z";
        }
        first = last;
      }
    }
    for (int level = -kLevels; level <= kLevels; ++level) {
      char style[64];
      std::snprintf(style, sizeof style, "fill:%s;fill-opacity:%.2f", level < 0 ? kLowColor : kHighColor,
                    std::abs(level) / static_cast<double>(kLevels));
      svg_.path(paths[static_cast<size_t>(level + kLevels)], "cells", style);
    }
  }

  void name_row(size_t row) {
    const double middle = row_top(row) + map_.row_height / 2 + 4;
    if (row < map_.row_names.size()) svg_.text(left_ - 6, middle, map_.row_names[row], "tick", Anchor::kEnd);
    if (row < map_.row_values.size()) svg_.text(width_ - right_ + 6, middle, map_.row_values[row], "tick");
    const auto& cells = map_.cells[row];
    for (size_t column = 0; map_.print_values && column < cells.size(); ++column) {
      if (!std::isfinite(cells[column])) continue;
      char text[16];
      std::snprintf(text, sizeof text, "%.2f", cells[column]);
      svg_.text((edge(column) + edge(column + 1)) / 2, middle, text, cells[column] > 0.6 ? "value on" : "value",
                Anchor::kMiddle);
    }
    if (map_.outline_last && !cells.empty()) {
      const double x = edge(cells.size() - 1);
      svg_.rect(x + 0.5, row_top(row) + 0.5, edge(cells.size()) - x - 1, map_.row_height - 1, "frame", "");
    }
  }

  const HeatMap& map_;
  double left_, right_, top_, width_, height_;
  size_t columns_ = 0;
  Svg svg_;
};

}  // namespace

std::string HeatMap::render(double width) const {
  return Picture(*this, width).draw();
}

std::string shade_legend(Shade shade, const std::string& low, const std::string& middle, const std::string& high) {
  std::string html = "<div class=\"legend\"><span>" + escape(low) + "</span><i class=\"ramp " +
                     (shade == Shade::kShare ? "share" : "ratio") + "\"></i><span>" + escape(high) + "</span>";
  if (!middle.empty()) html += "<span>" + escape(middle) + "</span>";
  return html + "</div>";
}

}  // namespace furlong::report
