#pragma once

// The page: sections of figures, as one HTML file without scripts or links to anything outside.

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace furlong::report {

/// Pictures are drawn twice, for a wide window and for a phone, so that letters keep their size.
using Draw = std::function<std::string(double width)>;

struct LegendEntry {
  std::string name, color;
  std::string css_class = "swatch";  // "swatch", "swatch dashed", "dot", "dot severe"
};

class Page {
 public:
  enum class Size {
    kHalf,  // two in a row in a wide window
    kTall,  // the same, beside two others
  };

  explicit Page(std::string title) : title_(std::move(title)) {}

  void add(const std::string& html);
  /// What is added from here on stands under this heading; a heading with nothing below it is not written.
  void section(const std::string& heading) { pending_heading_ = heading; }
  /// One sentence in place of a section that has no input.
  void left_out(const std::string& heading, const std::string& sentence);
  /// `note` is one or two sentences below the title; `legend` HTML.
  void figure(const std::string& title, const std::string& note, const std::string& legend_html, Size size,
              const Draw& draw);
  std::string html() const;

  static constexpr double kWideUnits = 1040, kHalfUnits = 505, kPhoneUnits = 350;

 private:
  std::string title_, body_, pending_heading_;
  std::vector<std::pair<std::string, std::string>> left_out_;
  bool in_section_ = false;
};

std::string legend(const std::vector<LegendEntry>& entries);
/// Colour of series i; repeats after six.
std::string series_color(size_t i);
/// A colour between the first and the last of `count` layers.
std::string depth_color(size_t i, size_t count);

}  // namespace furlong::report
