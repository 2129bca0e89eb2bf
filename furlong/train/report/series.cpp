#include <algorithm>
#include <cmath>
#include <limits>

#include "furlong/train/report/sections.h"

namespace furlong::report {

std::vector<StageSpan> stage_spans(const RunRecord& run) {
  std::vector<StageSpan> spans;
  for (size_t i = 0; i < run.steps.size(); ++i) {
    const StepRecord& step = run.steps[i];
    const bool goes_on =
        i > 0 && run.steps[i - 1].stage_index == step.stage_index && run.steps[i - 1].stage == step.stage;
    if (!goes_on) spans.push_back({step.stage, step.context, i, i});
    spans.back().last = i;
  }
  return spans;
}

std::vector<Band> stage_bands(const RunRecord& run) {
  std::vector<Band> bands;
  for (const StageSpan& span : stage_spans(run)) {
    const double from = span.first == 0 ? 0 : run.steps[span.first - 1].tokens;
    std::string name = span.name;
    if (span.context > 0) name += " \u00b7 " + format_number(static_cast<double>(span.context), Unit::kContext);
    bands.push_back({from, run.steps[span.last].tokens, name});
  }
  return bands;
}

Axis token_axis() {
  return {.title = "tokens trained", .unit = Unit::kCount, .low = 0.0};
}

Series step_series(const RunRecord& run, const std::string& name, const std::string& color,
                   const std::function<double(const StepRecord&)>& value) {
  Series series{name, color, {}, {}};
  for (const StepRecord& step : run.steps) {
    series.x.push_back(step.tokens);
    series.y.push_back(value(step));
  }
  return series;
}

Series smooth(const Series& series, double window) {
  const double keep = 1.0 - 1.0 / std::max(window / 2, 1.0);
  const auto pass = [&](auto first, auto last) {
    double sum = 0, weight = 0;
    for (auto value = first; value != last; ++value) {
      if (!std::isfinite(*value)) continue;
      sum = keep * sum + (1 - keep) * *value;
      weight = keep * weight + (1 - keep);
      *value = sum / weight;
    }
  };
  std::vector<double> forth = series.y, back = series.y;
  pass(forth.begin(), forth.end());
  pass(back.rbegin(), back.rend());
  Series out = series;
  for (size_t i = 0; i < out.y.size(); ++i) out.y[i] = (forth[i] + back[i]) / 2;
  return out;
}

double median(std::vector<double> values) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

ColumnGroups group_columns(const RunRecord& run, size_t limit, const std::function<bool(const StepRecord&)>& has) {
  std::vector<const StepRecord*> chosen;
  for (const StepRecord& step : run.steps) {
    if (has(step)) chosen.push_back(&step);
  }
  ColumnGroups columns;
  const size_t count = std::min(limit, chosen.size());
  columns.edges.push_back(0);
  for (size_t group = 0; group < count; ++group) {
    const size_t first = chosen.size() * group / count, last = chosen.size() * (group + 1) / count;
    columns.groups.emplace_back(chosen.begin() + static_cast<std::ptrdiff_t>(first),
                                chosen.begin() + static_cast<std::ptrdiff_t>(last));
    columns.edges.push_back(chosen[last - 1]->tokens);
  }
  return columns;
}

}  // namespace furlong::report
