#pragma once

// A line chart: series over one x axis, bands for the stages of a run, marks for single events.

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "furlong/train/report/scale.h"

namespace furlong::report {

struct Axis {
  std::string title;
  Unit unit = Unit::kPlain;
  bool log = false;
  std::optional<double> low = {}, high = {};  // else from the data
};

struct Series {
  std::string name;
  std::string color;         // "var(--s1)"
  std::vector<double> x, y;  // NaN in y: a gap
  enum class Style { kLine, kFaint, kDashed } style = Style::kLine;
};

/// A stretch of the x axis with a name of its own.
struct Band {
  double from = 0, to = 0;
  std::string name;
};

struct Mark {
  double x = 0, y = 0;  // y NaN: at the upper edge
  bool severe = false;
  std::string tooltip;
};

struct LineChart {
  std::string label;  // for screen readers
  Axis x, y;
  std::vector<Series> series = {};
  std::vector<Band> bands = {};
  std::vector<Mark> marks = {};
  std::optional<double> reference = {};  // a dashed level
  std::string reference_name = {};

  /// SVG of the given width in page units.
  std::string render(double width, double height) const;
};

/// At most `limit` points: within each stretch of x the lowest and the highest y are kept, so spikes survive.
Series thin_out(const Series& series, size_t limit);

}  // namespace furlong::report
