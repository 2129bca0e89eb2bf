// Bits per byte of held-out text beside general-purpose compressors.

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "furlong/train/report/sections.h"
#include "furlong/train/report/svg.h"

namespace furlong::report {
namespace {

struct Bar {
  std::string name;
  double value;
  std::string color;
};

std::string draw_bars(const std::vector<Bar>& bars, double width, double height) {
  constexpr double kLeft = 74, kRight = 52;
  Svg svg(width, height, "Bits per byte of held-out text");
  double top = 0;
  for (const Bar& bar : bars) top = std::max(top, bar.value);
  const double row = (height - 34) / static_cast<double>(bars.size());
  const Scale scale(0, top, kLeft, width - kRight, false);
  for (const double tick : scale.ticks(4, Unit::kPlain)) {
    svg.line(scale(tick), 4, scale(tick), height - 30, "grid");
    svg.text(scale(tick), height - 16, format_number(tick, Unit::kPlain), "tick", Anchor::kMiddle);
  }
  for (size_t i = 0; i < bars.size(); ++i) {
    const double y = 4 + row * static_cast<double>(i), thickness = std::min(row * 0.62, 34.0);
    const double middle = y + row / 2;
    char value[32];
    std::snprintf(value, sizeof value, "%.3f", bars[i].value);
    svg.rect(kLeft, middle - thickness / 2, scale(bars[i].value) - kLeft, thickness, "", "fill:" + bars[i].color);
    svg.text(kLeft - 8, middle + 4, bars[i].name, "strong", Anchor::kEnd);
    svg.text(scale(bars[i].value) + 6, middle + 4, value, "strong");
  }
  svg.line(kLeft, 4, kLeft, height - 30, "axis");
  svg.text((kLeft + width - kRight) / 2, height - 1, "bits per byte", "note", Anchor::kMiddle);
  return svg.str();
}

}  // namespace

void add_compression(Page& page, const RunRecord& run) {
  if (!run.eval && !run.baselines) {
    page.left_out("Bits per byte of held-out text",
                  "eval.json (furlong eval loss --out) and baselines.json (sizes under gzip and xz) would feed it.");
    return;
  }
  std::vector<Bar> bars;
  if (run.baselines) {
    bars.push_back({"gzip -9", run.baselines->gzip_bits_per_byte, "var(--s6)"});
    bars.push_back({"xz -9e", run.baselines->xz_bits_per_byte, "var(--s6)"});
  } else {
    page.left_out("gzip and xz", "baselines.json would feed their bars: bytes, gzip_bits_per_byte, xz_bits_per_byte.");
  }
  if (run.eval) {
    bars.push_back({"this model", run.eval->bits_per_byte, "var(--s1)"});
  } else {
    page.left_out("The model's bits per byte", "eval.json would feed it; furlong eval loss --out writes it.");
  }
  std::erase_if(bars, [](const Bar& bar) { return !std::isfinite(bar.value); });
  if (bars.empty()) return;
  std::string note = "Text that neither tokenizer nor training has seen; shorter is better.";
  if (run.baselines) note += " " + format_number(run.baselines->bytes, Unit::kCount) + "B of text.";
  page.figure("Held-out text: bits per byte", note, "", Page::Size::kHalf,
              [=](double width) { return draw_bars(bars, width, 250); });
}

}  // namespace furlong::report
