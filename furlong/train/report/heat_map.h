#pragma once

// Matrices as colour. A cell is a shade of one colour over the page's background (shares) or of two around a neutral
// middle (ratios), so that light and dark need no palettes of their own.

#include <string>
#include <vector>

namespace furlong::report {

enum class Shade {
  kShare,  // 0: background, 1: full colour
  kRatio,  // 0: full blue, 1: background, 2 and more: full orange
};

struct HeatMap {
  std::string label;  // for screen readers
  Shade shade = Shade::kShare;
  std::vector<std::vector<double>> cells = {};  // rows of columns; NaN, or a missing end of a row: no cell
  std::vector<double> column_edges = {};        // columns + 1 places in increasing order; empty: equal widths
  std::vector<std::string> row_names = {};      // empty: no names
  std::vector<std::string> row_values = {};     // a figure at the right of each row; empty: none
  std::vector<std::string> column_names = {};   // above the columns; empty: none
  std::vector<double> borders = {};             // vertical lines, in the units of column_edges
  bool print_values = false;                    // each cell's value as text
  bool outline_last = false;                    // frame the last cell of each row
  double row_height = 14;

  std::string render(double width) const;
};

/// A bar that shows a shade with its meaning at both ends (and in the middle, for ratios), as HTML.
std::string shade_legend(Shade shade, const std::string& low, const std::string& middle, const std::string& high);

}  // namespace furlong::report
