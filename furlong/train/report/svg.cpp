#include "furlong/train/report/svg.h"

#include <cmath>
#include <cstdint>
#include <cstdio>

namespace furlong::report {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

/// Length of the UTF-8 character at the start of `text`, 0 if there is none.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  const size_t length = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (length == 0 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  if ((lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xed && byte(1) > 0x9f)) return 0;
  if ((lead == 0xf0 && byte(1) < 0x90) || (lead == 0xf4 && byte(1) > 0x8f)) return 0;
  return length;
}

}  // namespace

std::string escape(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    const char c = text[0];
    if (length == 0 || (length == 1 && static_cast<uint8_t>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7f) {
      out += kReplacement;
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (c == '\'') {
      out += "&#39;";
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return out;
}

std::string coordinate(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  std::string out = text;
  if (out.size() > 2 && out.compare(out.size() - 2, 2, ".0") == 0) out.resize(out.size() - 2);
  return out == "-0" ? "0" : out;
}

Svg::Svg(double width, double height, std::string_view label) {
  body_ = "<svg viewBox=\"0 0 " + coordinate(width) + " " + coordinate(height) + "\" role=\"img\" aria-label=\"" +
          escape(label) + "\">";
}

void Svg::line(double x1, double y1, double x2, double y2, std::string_view css_class) {
  body_ += "<line x1=\"" + coordinate(x1) + "\" y1=\"" + coordinate(y1) + "\" x2=\"" + coordinate(x2) + "\" y2=\"" +
           coordinate(y2) + "\" class=\"" + std::string(css_class) + "\"/>";
}

void Svg::rect(double x, double y, double width, double height, std::string_view css_class, std::string_view style) {
  body_ += "<rect x=\"" + coordinate(x) + "\" y=\"" + coordinate(y) + "\" width=\"" + coordinate(width) +
           "\" height=\"" + coordinate(height) + "\" class=\"" + std::string(css_class) + "\"";
  if (!style.empty()) body_ += " style=\"" + std::string(style) + "\"";
  body_ += "/>";
}

void Svg::path(std::string_view data, std::string_view css_class, std::string_view style) {
  if (data.empty()) return;
  body_ += "<path d=\"" + std::string(data) + "\" class=\"" + std::string(css_class) + "\"";
  if (!style.empty()) body_ += " style=\"" + std::string(style) + "\"";
  body_ += "/>";
}

void Svg::text(double x, double y, std::string_view content, std::string_view css_class, Anchor anchor) {
  body_ += "<text x=\"" + coordinate(x) + "\" y=\"" + coordinate(y) + "\" class=\"" + std::string(css_class) + "\"";
  if (anchor != Anchor::kStart) {
    body_ += anchor == Anchor::kMiddle ? " text-anchor=\"middle\"" : " text-anchor=\"end\"";
  }
  body_ += ">" + escape(content) + "</text>";
}

void Svg::mark(double x, double y, std::string_view css_class, std::string_view tooltip) {
  body_ += "<circle cx=\"" + coordinate(x) + "\" cy=\"" + coordinate(y) + "\" r=\"3.5\" class=\"" +
           std::string(css_class) + "\"><title>" + escape(tooltip) + "</title></circle>";
}

}  // namespace furlong::report
