// How the router spreads tokens over experts: load over time, largest overload, range of the correction bias.

#include <algorithm>
#include <cmath>
#include <limits>

#include "furlong/train/report/heat_map.h"
#include "furlong/train/report/sections.h"
#include "furlong/train/report/svg.h"

namespace furlong::report {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kMaxColumns = 60, kMaxPanels = 24, kMaxRows = 64;

bool has_load(const StepRecord& step) {
  return std::any_of(step.load.begin(), step.load.end(), [](const auto& layer) { return !layer.empty(); });
}

/// Load of each expert (or group of neighbours, beyond kMaxRows) relative to the mean, over one column of steps.
std::vector<double> relative_load(const std::vector<const StepRecord*>& steps, size_t layer, size_t experts) {
  std::vector<double> load(experts, 0.0);
  double total = 0;
  for (const StepRecord* step : steps) {
    if (layer >= step->load.size() || step->load[layer].size() != experts) continue;
    for (size_t e = 0; e < experts; ++e) {
      const double tokens = step->load[layer][e];
      if (std::isfinite(tokens)) load[e] += tokens, total += tokens;
    }
  }
  const size_t rows = std::min(experts, kMaxRows);
  std::vector<double> relative(rows, kNaN);
  for (size_t row = 0; row < rows && total > 0; ++row) {
    const size_t first = experts * row / rows, last = experts * (row + 1) / rows;
    double sum = 0;
    for (size_t e = first; e < last; ++e) sum += load[e];
    relative[row] = sum / static_cast<double>(last - first) * static_cast<double>(experts) / total;
  }
  return relative;
}

HeatMap load_map(const RunRecord& run, const ColumnGroups& columns, size_t layer, size_t experts) {
  HeatMap map{.label = "Expert load over time, layer " + std::to_string(layer + 1), .shade = Shade::kRatio};
  const size_t rows = std::min(experts, kMaxRows);
  map.cells.assign(rows, std::vector<double>(columns.groups.size(), kNaN));
  for (size_t c = 0; c < columns.groups.size(); ++c) {
    const std::vector<double> column = relative_load(columns.groups[c], layer, experts);
    for (size_t row = 0; row < rows; ++row) map.cells[row][c] = column[row];
  }
  map.column_edges = columns.edges;
  const std::vector<Band> bands = stage_bands(run);
  for (size_t i = 1; i < bands.size(); ++i) {
    if (bands[i].from < columns.edges.back()) map.borders.push_back(bands[i].from);
  }
  map.row_height = std::clamp(128.0 / static_cast<double>(rows), 2.0, 12.0);
  return map;
}

/// "max 1.31x": the most loaded expert in the last column.
std::string last_peak(const HeatMap& map) {
  double peak = 0;
  for (const auto& row : map.cells) peak = std::max(peak, std::isfinite(row.back()) ? row.back() : 0);
  return "max " + format_number(peak, Unit::kPlain) + "\u00d7";
}

void add_load_figure(Page& page, const RunRecord& run) {
  const ColumnGroups columns = group_columns(run, kMaxColumns, has_load);
  if (columns.groups.empty()) {
    page.left_out("Expert load",
                  "No line of metrics.jsonl has load; furlong train writes it every log.detail_every steps.");
    return;
  }
  std::vector<std::pair<size_t, size_t>> layers;  // layer, experts
  const StepRecord& last = *columns.groups.back().back();
  for (size_t layer = 0; layer < last.load.size(); ++layer) {
    if (!last.load[layer].empty()) layers.emplace_back(layer, last.load[layer].size());
  }
  const size_t shown = std::min(layers.size(), kMaxPanels);
  std::string panels;
  for (size_t i = 0; i < shown; ++i) {
    const auto [layer, experts] = layers[layers.size() * i / shown];
    const HeatMap map = load_map(run, columns, layer, experts);
    panels += "<div><h4>layer " + std::to_string(layer + 1) + "<span>" + last_peak(map) + "</span></h4>" +
              map.render(230) + "</div>";
  }
  std::string note =
      "Tokens sent to each expert relative to the mean. Experts from top to bottom, time from left to right (0 to " +
      format_number(columns.edges.back(), Unit::kCount) +
      " tokens); at the right of a title, the most loaded expert at the end.";
  if (shown < layers.size()) note += " " + std::to_string(shown) + " of " + std::to_string(layers.size()) + " layers.";
  if (layers[0].second > kMaxRows) note += " A row is the mean of several experts.";
  page.add("<figure><figcaption><h3>Expert load by layer</h3><p class=\"note-text\">" + escape(note) +
           "</p></figcaption>" + shade_legend(Shade::kRatio, "idle", "", "twice the mean") + "<div class=\"panels\">" +
           panels + "</div></figure>");
}

/// The MaxVio that even exact quantiles leave, for n experts, k of them chosen, m tokens a step: two samples of q =
/// mk/n tokens differ by sqrt((1 - k/n) 2/q), and the largest of n such deviations is about sqrt(2 ln n) of them.
double noise_floor(double num_experts, double chosen, double tokens) {
  const double per_expert = tokens * chosen / num_experts;
  return std::sqrt(2 * std::log(num_experts)) * std::sqrt((1 - chosen / num_experts) * 2 / per_expert);
}

void add_violation_figure(Page& page, const RunRecord& run) {
  const Series worst =
      step_series(run, "worst layer", series_color(1), [](const StepRecord& step) { return step.max_vio; });
  const Series mean =
      step_series(run, "mean of the layers", series_color(0), [](const StepRecord& step) { return step.max_vio_mean; });
  if (!std::isfinite(median(worst.y))) return;
  LineChart chart{.label = "MaxVio over the tokens trained",
                  .x = token_axis(),
                  .y = {.title = "MaxVio", .log = true},
                  .series = {thin_out(worst, 600), thin_out(mean, 600)},
                  .bands = stage_bands(run)};
  std::vector<LegendEntry> entries{{"worst layer", worst.color}, {"mean of the layers", mean.color}};
  if (run.model && run.model->moe.num_experts > 1) {
    const auto experts = static_cast<double>(run.model->moe.num_experts);
    const auto chosen = static_cast<double>(run.model->moe.experts_per_token);
    Series floor{"noise floor", "var(--muted)", {}, {}, Series::Style::kDashed};
    for (size_t i = 0; i < run.steps.size(); ++i) {
      const double tokens = run.steps[i].tokens - (i == 0 ? 0 : run.steps[i - 1].tokens);
      floor.x.push_back(run.steps[i].tokens);
      floor.y.push_back(noise_floor(experts, chosen, tokens));
    }
    chart.series.push_back(thin_out(floor, 300));
    entries.push_back({"noise floor of a step's tokens", floor.color, "swatch dashed"});
  }
  page.figure("MaxVio", "Load of the busiest expert over the mean load, less one. 0 is perfect balance.",
              legend(entries), Page::Size::kHalf, [=](double width) { return chart.render(width, 270); });
}

void add_bias_figure(Page& page, const RunRecord& run) {
  size_t layers = 0;
  for (const StepRecord& step : run.steps) layers = std::max(layers, step.bias_range.size());
  LineChart chart{.label = "Range of the correction bias by layer",
                  .x = token_axis(),
                  .y = {.title = "max - min of the bias"},
                  .bands = stage_bands(run)};
  std::vector<Series> found;
  for (size_t layer = 0; layer < layers; ++layer) {
    Series series = step_series(
        run, "layer " + std::to_string(layer + 1), depth_color(layer, layers),
        [=](const StepRecord& step) { return layer < step.bias_range.size() ? step.bias_range[layer] : kNaN; });
    if (std::isfinite(median(series.y))) found.push_back(thin_out(series, 300));
  }
  if (found.empty()) {
    page.left_out("Range of the correction bias",
                  "No line of metrics.jsonl has bias_range; furlong train writes it for models with experts.");
    return;
  }
  constexpr size_t kMaxLines = 12;
  const size_t shown = std::min(found.size(), kMaxLines);
  for (size_t i = 0; i < shown; ++i) chart.series.push_back(found[found.size() * i / shown]);
  const std::string ends = legend(
      {{chart.series.front().name, chart.series.front().color}, {chart.series.back().name, chart.series.back().color}});
  page.figure("Range of the correction bias",
              "Largest minus smallest bias of a layer's experts; colour runs from the first layer to the last.", ends,
              Page::Size::kHalf, [=](double width) { return chart.render(width, 270); });
}

}  // namespace

void add_experts(Page& page, const RunRecord& run) {
  if (run.steps.empty()) {
    page.left_out("Experts", "metrics.jsonl would feed load, MaxVio and bias range; furlong train writes it.");
    return;
  }
  if (run.model && run.model->moe.num_experts == 0) {
    page.left_out("Experts", "This model has none (config.toml).");
    return;
  }
  page.section("Experts");
  add_load_figure(page, run);
  add_violation_figure(page, run);
  add_bias_figure(page, run);
}

}  // namespace furlong::report
