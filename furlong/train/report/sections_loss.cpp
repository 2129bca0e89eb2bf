// Loss over the run, by stage, and by position in the context.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "furlong/train/report/sections.h"
#include "furlong/train/report/svg.h"

namespace furlong::report {
namespace {

constexpr size_t kMaxPoints = 700;

LineChart loss_chart(const RunRecord& run, bool log) {
  const Series loss = step_series(run, "each step", series_color(0), [](const StepRecord& step) { return step.loss; });
  Series faint = thin_out(loss, kMaxPoints);
  faint.style = Series::Style::kFaint;
  LineChart chart{.label = "Training loss over the tokens trained",
                  .x = token_axis(),
                  .y = {.title = "nats per token"},
                  .series = {faint, thin_out(smooth(loss, static_cast<double>(run.steps.size()) / 60), kMaxPoints)},
                  .bands = stage_bands(run)};
  if (log) {
    chart.x.log = chart.y.log = true;
    chart.x.low = run.steps.front().tokens > 0 ? std::optional<double>(run.steps.front().tokens) : std::nullopt;
    for (Band& band : chart.bands) band.from = std::max(band.from, run.steps.front().tokens);
  }
  return chart;
}

std::string picture(const RunRecord& run, bool log) {
  const LineChart chart = loss_chart(run, log);
  return "<div class=\"picture wide\">" + chart.render(Page::kWideUnits, 330) + "</div><div class=\"picture phone\">" +
         chart.render(Page::kPhoneUnits, 250) + "</div>";
}

/// Two decimals; "-" for a value that is not finite.
std::string decimals(double value) {
  if (!std::isfinite(value)) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

std::string stage_table(const RunRecord& run) {
  std::string html =
      "<div class=\"scroll\"><table><tr><th>stage</th><th>context</th><th>tokens</th><th>steps</th><th>loss at "
      "start</th>"
      "<th>loss at end</th><th>tokens/s</th></tr>";
  for (const StageSpan& span : stage_spans(run)) {
    const size_t count = span.last - span.first + 1, few = std::max<size_t>(1, count / 20);
    std::vector<double> start, end, rates;
    for (size_t i = span.first; i <= span.last; ++i) {
      if (i < span.first + few) start.push_back(run.steps[i].loss);
      if (i > span.last - few) end.push_back(run.steps[i].loss);
      rates.push_back(run.steps[i].tokens_per_s);
    }
    const double before = span.first == 0 ? 0 : run.steps[span.first - 1].tokens;
    const auto cell = [&](const std::string& text) { html += "<td>" + escape(text) + "</td>"; };
    const auto number = [](double value, Unit unit) {
      return std::isfinite(value) ? format_number(value, unit) : std::string("-");
    };
    html += "<tr>";
    cell(span.name);
    cell(span.context > 0 ? format_number(static_cast<double>(span.context), Unit::kContext) : "-");
    cell(format_number(run.steps[span.last].tokens - before, Unit::kCount));
    cell(format_number(static_cast<double>(count), Unit::kCount));
    cell(decimals(median(start)));
    cell(decimals(median(end)));
    cell(number(median(rates), Unit::kCount));
    html += "</tr>";
  }
  return html + "</table></div>";
}

void add_loss_figure(Page& page, const RunRecord& run) {
  page.add(
      "<figure><input type=\"radio\" name=\"loss\" id=\"loss-a\" class=\"choice a\" checked>"
      "<input type=\"radio\" name=\"loss\" id=\"loss-b\" class=\"choice b\">"
      "<div class=\"switch\"><label for=\"loss-a\" class=\"a\">linear</label><label for=\"loss-b\" "
      "class=\"b\">log</label></div>"
      "<figcaption><h3>Training loss by stage</h3><p class=\"note-text\">Nats per token. Borders between stages are "
      "dotted; "
      "each carries its context length.</p></figcaption>" +
      legend({{"running mean", series_color(0)}, {"each step (extremes kept)", series_color(0), "swatch thin"}}) +
      "<div class=\"view a\">" + picture(run, false) + "</div><div class=\"view b\">" + picture(run, true) + "</div>" +
      stage_table(run) + "</figure>");
}

/// Nats and targets by the first position of their bucket.
using PositionSums = std::map<double, std::pair<double, double>>;

void add_to(PositionSums& sums, const PositionLoss& record) {
  for (size_t k = 0; k < record.first.size(); ++k) {
    if (!std::isfinite(record.loss[k]) || !(record.targets[k] > 0)) continue;
    auto& [nats, targets] = sums[record.first[k]];
    nats += record.loss[k] * record.targets[k];
    targets += record.targets[k];
  }
}

Series means(const PositionSums& sums, const std::string& name, const std::string& color) {
  Series series{name, color, {}, {}};
  for (const auto& [first, sum] : sums) {
    series.x.push_back(std::max(first * 1.5, 1.0));  // the middle of [first, 2 first)
    series.y.push_back(sum.first / sum.second);
  }
  return series;
}

/// Mean loss by position over the records of the last quarter of a stage.
Series position_series(const RunRecord& run, const StageSpan& span, size_t color) {
  PositionSums sums;
  const size_t from = span.last - (span.last - span.first) / 4;
  for (size_t i = span.last + 1; i-- > span.first && (i >= from || sums.empty());) {
    if (run.steps[i].position_loss) add_to(sums, *run.steps[i].position_loss);
  }
  return means(sums, span.name, series_color(color));
}

void add_position_figure(Page& page, const RunRecord& run) {
  LineChart chart{.label = "Loss by position in the context, one line a stage",
                  .x = {.title = "position of the input token in its document", .unit = Unit::kContext, .log = true},
                  .y = {.title = "nats per token"}};
  std::vector<LegendEntry> entries;
  const std::vector<StageSpan> spans = stage_spans(run);
  for (size_t i = 0; i < spans.size(); ++i) {
    Series series = position_series(run, spans[i], i);
    if (series.x.empty()) continue;
    entries.push_back({spans[i].name, series.color});
    chart.series.push_back(std::move(series));
  }
  if (run.eval && run.eval->position_loss) {
    PositionSums sums;
    add_to(sums, *run.eval->position_loss);
    Series series = means(sums, "held-out text", "var(--fg)");
    series.style = Series::Style::kDashed;
    entries.push_back({series.name, series.color, "swatch dashed"});
    chart.series.push_back(std::move(series));
  }
  if (chart.series.empty()) {
    page.left_out("Loss by position",
                  "No line of metrics.jsonl has position_loss; furlong train writes it every log.detail_every steps.");
    return;
  }
  page.figure("Loss by position in the context",
              "Towards the end of each stage. A falling line means that the model uses what came before.",
              legend(entries), Page::Size::kHalf, [=](double width) { return chart.render(width, 270); });
}

}  // namespace

void add_loss(Page& page, const RunRecord& run) {
  if (run.steps.empty()) {
    page.left_out("Loss by stage and by position", "metrics.jsonl would feed it; furlong train writes it.");
    return;
  }
  add_loss_figure(page, run);
  add_position_figure(page, run);
}

}  // namespace furlong::report
