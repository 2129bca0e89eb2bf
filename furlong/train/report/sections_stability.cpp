// Gradient norm with the steps that the monitor marked or skipped.

#include <cmath>

#include "furlong/train/report/sections.h"

namespace furlong::report {

void add_gradient_norm(Page& page, const RunRecord& run) {
  if (run.steps.empty()) {
    page.left_out("Gradient norm", "metrics.jsonl would feed it; furlong train writes it.");
    return;
  }
  const Series norm =
      step_series(run, "gradient norm", series_color(0), [](const StepRecord& step) { return step.grad_norm; });
  LineChart chart{.label = "Gradient norm over the tokens trained",
                  .x = token_axis(),
                  .y = {.title = "norm before clipping", .log = true},
                  .series = {thin_out(norm, 700)},
                  .bands = stage_bands(run)};
  if (run.clip && *run.clip > 0) {
    chart.reference = run.clip;
    chart.reference_name = "clip " + format_number(*run.clip, Unit::kPlain);
  }
  int64_t spikes = 0, skips = 0;
  for (const StepRecord& step : run.steps) {
    if (step.verdict == "ok") continue;
    const bool skipped = step.verdict == "skip";
    ++(skipped ? skips : spikes);
    std::string tooltip = "step " + std::to_string(step.step) + ": " + step.verdict;
    if (!step.reason.empty()) tooltip += ", " + step.reason;
    if (chart.marks.size() < 500) chart.marks.push_back({step.tokens, step.grad_norm, skipped, tooltip});
  }
  page.figure(
      "Gradient norm",
      std::to_string(spikes) + (spikes == 1 ? " spike marked, " : " spikes marked, ") + std::to_string(skips) +
          (skips == 1 ? " step skipped." : " steps skipped."),
      legend(
          {{"each step (extremes kept)", series_color(0)}, {"spike", "", "dot"}, {"skipped step", "", "dot severe"}}),
      Page::Size::kHalf, [=](double width) { return chart.render(width, 270); });
}

}  // namespace furlong::report
