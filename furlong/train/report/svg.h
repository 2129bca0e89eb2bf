#pragma once

// Text of SVG and HTML, escaped. Colours and type come from the page's style sheet through classes and variables, so
// that one picture serves light and dark.

#include <string>
#include <string_view>

namespace furlong::report {

/// Escapes text for element content and attribute values. Control characters that HTML forbids and bytes that are not
/// UTF-8 become U+FFFD.
std::string escape(std::string_view text);

/// A coordinate: one decimal, no trailing zero.
std::string coordinate(double value);

/// What text gives over to the reader of an SVG.
enum class Anchor { kStart, kMiddle, kEnd };

class Svg {
 public:
  /// `label` is what a screen reader says of the picture.
  Svg(double width, double height, std::string_view label);

  void line(double x1, double y1, double x2, double y2, std::string_view css_class);
  /// `style`: "fill:var(--s1)" and the like; may be empty.
  void rect(double x, double y, double width, double height, std::string_view css_class, std::string_view style);
  void path(std::string_view data, std::string_view css_class, std::string_view style);
  void text(double x, double y, std::string_view content, std::string_view css_class, Anchor anchor = Anchor::kStart);
  /// A small mark with a tooltip.
  void mark(double x, double y, std::string_view css_class, std::string_view tooltip);

  std::string str() const { return body_ + "</svg>"; }

 private:
  std::string body_;
};

}  // namespace furlong::report
