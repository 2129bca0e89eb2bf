// What the run and the model cost: tokens per second, and bytes that a sequence occupies against its length.

#include <cmath>
#include <numeric>

#include "furlong/model/count.h"
#include "furlong/train/report/sections.h"

namespace furlong::report {
namespace {

/// Bytes of one sequence by context length: a constant part and a part a token, caches in bf16.
Series memory_series(const std::string& name, size_t color, double constant, double per_token, double longest) {
  Series series{name, series_color(color), {}, {}};
  for (double context = 256; context <= longest * 1.0001; context *= 2) {
    series.x.push_back(context);
    series.y.push_back(constant + per_token * context);
  }
  return series;
}

}  // namespace

void add_speed(Page& page, const RunRecord& run) {
  if (run.steps.empty()) {
    page.left_out("Tokens per second", "metrics.jsonl would feed it; furlong train writes it.");
    return;
  }
  const Series rate =
      step_series(run, "tokens per second", series_color(0), [](const StepRecord& step) { return step.tokens_per_s; });
  if (!std::isfinite(median(rate.y))) {
    page.left_out("Tokens per second", "No line of metrics.jsonl has tokens_per_s; furlong train writes it.");
    return;
  }
  Series faint = thin_out(rate, 600);
  faint.style = Series::Style::kFaint;
  const LineChart chart{.label = "Tokens per second over the tokens trained",
                        .x = token_axis(),
                        .y = {.title = "tokens per second", .unit = Unit::kCount, .low = 0.0},
                        .series = {faint, thin_out(smooth(rate, static_cast<double>(run.steps.size()) / 60), 600)},
                        .bands = stage_bands(run)};
  page.figure(
      "Training speed", "Tokens per second, forward, backward and optimizer step.",
      legend({{"running mean", series_color(0)}, {"each step (extremes kept)", series_color(0), "swatch thin"}}),
      Page::Size::kHalf, [=](double width) { return chart.render(width, 270); });
}

void add_state_bytes(Page& page, const RunRecord& run) {
  if (!run.model) {
    page.left_out("State and cache bytes", "config.toml would feed it; furlong train writes it.");
    return;
  }
  const ModelConfig& model = *run.model;
  ModelConfig attention = model;
  attention.full_attention_layers.resize(static_cast<size_t>(model.num_layers));
  std::iota(attention.full_attention_layers.begin(), attention.full_attention_layers.end(), 1);
  const ModelCount hybrid = count(model), latent = count(attention);
  const double full_per_token =
      2.0 * static_cast<double>(model.num_layers * model.mla.heads) *
      static_cast<double>(model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim + model.mla.v_head_dim);
  constexpr double kLongest = 1048576;
  LineChart chart{.label = "Bytes of one sequence against its length",
                  .x = {.title = "context in tokens", .unit = Unit::kContext, .log = true},
                  .y = {.title = "bytes of one sequence", .unit = Unit::kBytes, .log = true},
                  .series = {memory_series("keys and values in every layer", 5, 0, full_per_token, kLongest),
                             memory_series("latent cache in every layer", 1, 0, latent.cache_bytes_per_token, kLongest),
                             memory_series("this hybrid", 0, hybrid.state_bytes + hybrid.conv_state_bytes,
                                           hybrid.cache_bytes_per_token, kLongest)}};
  std::vector<LegendEntry> entries;
  for (const Series& series : chart.series) {
    entries.push_back({series.name + ": " + format_number(series.y.back(), Unit::kBytes), series.color});
  }
  page.figure("State and cache of one sequence",
              "Recurrent state in fp32, caches in bf16; the figures are those at 1M tokens. The others: the same shape "
              "with attention in all " +
                  std::to_string(model.num_layers) + " layers.",
              legend(entries), Page::Size::kHalf, [=](double width) { return chart.render(width, 270); });
}

}  // namespace furlong::report
