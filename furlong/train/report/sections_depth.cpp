// What tokens remember and read: saturated decays of KDA, weights of the attention-residual reads over depth.

#include <algorithm>
#include <cmath>
#include <limits>

#include "furlong/train/report/heat_map.h"
#include "furlong/train/report/sections.h"

namespace furlong::report {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double mean_of(const std::vector<const StepRecord*>& steps, size_t layer) {
  double sum = 0;
  size_t count = 0;
  for (const StepRecord* step : steps) {
    if (layer >= step->decay_saturation.size() || !std::isfinite(step->decay_saturation[layer])) continue;
    sum += step->decay_saturation[layer];
    ++count;
  }
  return count > 0 ? sum / static_cast<double>(count) : kNaN;
}

/// Rows in the order in which the decoder reads: attention and MLP of each layer, then the output.
HeatMap depth_map(const StepRecord& step) {
  HeatMap map{.label = "Weights of the attention-residual reads", .outline_last = true};
  const auto add = [&](const std::string& name, const std::vector<double>& weights) {
    if (weights.empty()) return;
    map.row_names.push_back(name);
    map.cells.push_back(weights);
  };
  for (size_t layer = 0; layer < std::max(step.attention_depth.size(), step.mlp_depth.size()); ++layer) {
    const std::string number = std::to_string(layer + 1);
    if (layer < step.attention_depth.size()) add(number + " mixer", step.attention_depth[layer]);
    if (layer < step.mlp_depth.size()) add(number + " MLP", step.mlp_depth[layer]);
  }
  add("output", step.output_depth);
  size_t sources = 0;
  for (const auto& row : map.cells) sources = std::max(sources, row.size());
  if (sources <= 12) map.column_names.push_back("embedding");
  for (size_t i = 1; i < sources && sources <= 12; ++i) map.column_names.push_back("block " + std::to_string(i));
  map.row_height = std::clamp(640.0 / static_cast<double>(map.cells.size()), 5.0, 17.0);
  map.print_values = map.row_height >= 12 && sources <= 10;
  if (map.row_height < 11) map.row_names.clear();
  return map;
}

}  // namespace

void add_decays(Page& page, const RunRecord& run) {
  if (run.steps.empty()) {
    page.left_out("Saturated decays", "metrics.jsonl would feed it; furlong train writes it.");
    return;
  }
  const ColumnGroups columns =
      group_columns(run, 80, [](const StepRecord& step) { return !step.decay_saturation.empty(); });
  size_t layers = 0;
  for (const auto& group : columns.groups) layers = std::max(layers, group.back()->decay_saturation.size());
  HeatMap map{.label = "Share of saturated decays by layer over time"};
  double largest = 0;
  for (size_t layer = 0; layer < layers; ++layer) {
    std::vector<double> row;
    for (const auto& group : columns.groups) row.push_back(mean_of(group, layer));
    if (!std::isfinite(median(row))) continue;
    for (const double share : row) largest = std::max(largest, std::isfinite(share) ? share : 0);
    map.row_names.push_back("layer " + std::to_string(layer + 1));
    map.row_values.push_back(std::isfinite(row.back()) ? format_number(row.back(), Unit::kPercent) : "");
    map.cells.push_back(std::move(row));
  }
  if (map.cells.empty()) {
    page.left_out("Saturated decays",
                  "No line of metrics.jsonl has decay_saturation; furlong train writes it for KDA layers.");
    return;
  }
  const double full = largest > 0 ? std::min(1.0, std::max(largest, 0.01)) : 1.0;
  for (auto& row : map.cells) {
    for (double& share : row) share /= full;
  }
  map.column_edges = columns.edges;
  const std::vector<Band> bands = stage_bands(run);
  for (size_t i = 1; i < bands.size(); ++i) map.borders.push_back(std::min(bands[i].from, columns.edges.back()));
  map.row_height = std::clamp(200.0 / static_cast<double>(map.cells.size()), 7.0, 26.0);
  if (map.row_height < 11) map.row_names.clear(), map.row_values.clear();
  page.figure("Saturated decays by KDA layer",
              "Share of decays within 1% of the gate's lower bound: channels that forget all they can. Time from left "
              "to right (0 to " +
                  format_number(columns.edges.back(), Unit::kCount) + " tokens), share at the end on the right.",
              shade_legend(Shade::kShare, "0%", "", format_number(full, Unit::kPercent)), Page::Size::kHalf,
              [=](double width) { return map.render(width); });
}

void add_depth_weights(Page& page, const RunRecord& run) {
  if (run.steps.empty()) {
    page.left_out("Attention-residual weights", "metrics.jsonl would feed it; furlong train writes it.");
    return;
  }
  if (run.model && run.model->attnres_block_size == 0) {
    page.left_out("Attention-residual weights", "This model has plain residuals (config.toml).");
    return;
  }
  const StepRecord* latest = nullptr;
  for (const StepRecord& step : run.steps) {
    if (!step.output_depth.empty() || !step.mlp_depth.empty()) latest = &step;
  }
  if (latest == nullptr) {
    page.left_out("Attention-residual weights",
                  "No line of metrics.jsonl has mlp_depth_weight; furlong train writes it every log.detail_every steps "
                  "for models "
                  "with attention residuals.");
    return;
  }
  const HeatMap map = depth_map(*latest);
  std::string note = "Mean weight of each source (columns) in each read (rows, from the first layer down) at step " +
                     std::to_string(latest->step) + ".";
  if (run.model) note += " A block sums " + std::to_string(run.model->attnres_block_size) + " layers.";
  page.figure("Attention-residual weights by depth", note,
              shade_legend(Shade::kShare, "0", "", "1") +
                  "<div class=\"legend\"><span><i class=\"key\"></i>the block still being summed</span></div>",
              Page::Size::kTall, [=](double width) { return map.render(width); });
}

}  // namespace furlong::report
