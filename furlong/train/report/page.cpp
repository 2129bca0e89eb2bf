#include "furlong/train/report/page.h"

#include "furlong/train/report/style.h"
#include "furlong/train/report/svg.h"

namespace furlong::report {

void Page::add(const std::string& html) {
  if (!pending_heading_.empty()) {
    if (in_section_) body_ += "</div></section>";
    body_ += "<section><h2>" + escape(pending_heading_) + "</h2><div class=\"figures\">";
    in_section_ = true;
    pending_heading_.clear();
  }
  body_ += html;
}

void Page::left_out(const std::string& heading, const std::string& sentence) {
  left_out_.emplace_back(heading, sentence);
}

void Page::figure(const std::string& title, const std::string& note, const std::string& legend_html, Size size,
                  const Draw& draw) {
  std::string html = std::string("<figure class=\"") + (size == Size::kTall ? "half tall" : "half") +
                     "\"><figcaption><h3>" + escape(title) + "</h3>";
  if (!note.empty()) html += "<p class=\"note-text\">" + escape(note) + "</p>";
  add(html + "</figcaption>" + legend_html + "<div class=\"picture wide\">" + draw(kHalfUnits) +
      "</div><div class=\"picture phone\">" + draw(kPhoneUnits) + "</div></figure>");
}

std::string Page::html() const {
  std::string html =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>" +
      escape(title_) + "</title><style>" + kStyle + "</style></head><body><main>" + body_;
  if (in_section_) html += "</div></section>";
  if (!left_out_.empty()) {
    html += "<section><h2>Not shown</h2>";
    for (const auto& [heading, sentence] : left_out_) {
      html += "<p class=\"missing\"><b>" + escape(heading) + ".</b> " + escape(sentence) + "</p>";
    }
    html += "</section>";
  }
  return html + "<footer>Made by furlong report (version " FURLONG_VERSION
                "). This file needs nothing else.</footer></main></body></html>\n";
}

std::string legend(const std::vector<LegendEntry>& entries) {
  std::string html = "<div class=\"legend\">";
  for (const LegendEntry& entry : entries) {
    html += "<span><i class=\"" + entry.css_class + "\"";
    if (!entry.color.empty()) html += " style=\"border-color:" + entry.color + "\"";
    html += "></i>" + escape(entry.name) + "</span>";
  }
  return html + "</div>";
}

std::string series_color(size_t i) {
  return "var(--s" + std::to_string(i % 6 + 1) + ")";
}

std::string depth_color(size_t i, size_t count) {
  const size_t share = count > 1 ? 100 * i / (count - 1) : 0;
  return "color-mix(in oklab,var(--s1)," + std::string("var(--s2) ") + std::to_string(share) + "%)";
}

}  // namespace furlong::report
