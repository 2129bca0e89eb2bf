#include "furlong/train/report/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "furlong/base/file.h"
#include "furlong/model/count.h"
#include "furlong/train/report/sections.h"
#include "furlong/train/report/svg.h"

namespace furlong::report {
namespace {

std::string decimals(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string duration(double seconds) {
  if (seconds < 120) return decimals(seconds, 0) + " s";
  if (seconds < 7200) return decimals(seconds / 60, 0) + " min";
  return decimals(seconds / 3600, 1) + " h";
}

std::string describe(const ModelConfig& model) {
  const int64_t attention = model.num_full_attention();
  std::string text = std::to_string(model.num_layers) + " layers of width " + std::to_string(model.hidden_size) + ": " +
                     std::to_string(model.num_layers - attention) + " Kimi delta attention, " +
                     std::to_string(attention) + " multi-head latent attention";
  if (model.moe.num_experts > 0) {
    text += "; " + std::to_string(model.moe.num_experts) + " experts, " + std::to_string(model.moe.experts_per_token) +
            " chosen";
  }
  if (model.attnres_block_size > 0)
    text += "; attention residuals over blocks of " + std::to_string(model.attnres_block_size);
  return text + ".";
}

class Tiles {
 public:
  void add(const std::string& value, const std::string& name) {
    html_ += "<div class=\"tile\"><b>" + escape(value) + "</b><span>" + escape(name) + "</span></div>";
  }
  void add_if(double value, const std::string& text, const std::string& name) {
    if (std::isfinite(value)) add(text, name);
  }
  std::string html() const { return html_.empty() ? "" : "<div class=\"tiles\">" + html_ + "</div>"; }

 private:
  std::string html_;
};

/// Figures of the run as a whole, as far as metrics.jsonl tells them.
void add_run_tiles(Tiles& tiles, const RunRecord& run) {
  std::vector<double> losses, rates, vios;
  double seconds = 0, peak = 0;
  const size_t few = std::max<size_t>(1, run.steps.size() / 20);
  for (size_t i = 0; i < run.steps.size(); ++i) {
    const StepRecord& step = run.steps[i];
    rates.push_back(step.tokens_per_s);
    if (i + few >= run.steps.size()) {
      losses.push_back(step.loss);
      vios.push_back(step.max_vio);
    }
    if (std::isfinite(step.seconds)) seconds += step.seconds;
    if (std::isfinite(step.peak_rss_bytes)) peak = std::max(peak, step.peak_rss_bytes);
  }
  tiles.add_if(median(losses), decimals(median(losses), 3), "training loss at the end, nats per token");
  tiles.add(format_number(run.steps.back().tokens, Unit::kCount),
            "tokens trained, " + std::to_string(run.steps.back().step) + " steps");
  if (seconds > 0) tiles.add(duration(seconds), "of training steps");
  tiles.add_if(median(rates), format_number(median(rates), Unit::kCount), "tokens per second (median)");
  tiles.add_if(median(vios), decimals(median(vios), 2), "MaxVio at the end (worst layer)");
  if (peak > 0) tiles.add(format_number(peak, Unit::kBytes), "peak memory of the process");
}

}  // namespace

void add_header(Page& page, const RunRecord& run) {
  page.add("<header><h1>" + escape(run.name) + "</h1>");
  if (run.model) page.add("<p class=\"lead\">" + escape(describe(*run.model)) + "</p>");
  Tiles tiles;
  if (run.eval && std::isfinite(run.eval->bits_per_byte)) {
    std::string name = "bits per byte of held-out text";
    if (run.baselines) name += " (xz -9e: " + decimals(run.baselines->xz_bits_per_byte, 2) + ")";
    tiles.add(decimals(run.eval->bits_per_byte, 3), name);
  }
  if (run.model) {
    const ModelCount size = count(*run.model);
    tiles.add(format_number(size.parameters, Unit::kCount),
              "parameters, " + format_number(size.active_parameters, Unit::kCount) + " active for a token");
  } else {
    page.left_out("Description of the model", "config.toml would feed it; furlong train writes it.");
  }
  if (!run.steps.empty()) add_run_tiles(tiles, run);
  page.add(tiles.html() + "</header>");
}

void add_samples(Page& page, const RunRecord& run) {
  if (run.samples.empty()) {
    page.left_out("Generated samples",
                  "samples.jsonl would feed them: one {\"prompt\", \"text\", \"temperature\"} a line.");
    return;
  }
  page.section("Samples");
  std::string html = "<div class=\"samples\" style=\"grid-column:1/-1\">";
  for (const Sample& sample : run.samples) {
    const bool repeats = sample.text.compare(0, sample.prompt.size(), sample.prompt) == 0;
    html += "<blockquote><b>" + escape(sample.prompt) + "</b>" +
            escape(repeats ? sample.text.substr(sample.prompt.size()) : sample.text);
    if (sample.temperature && std::isfinite(*sample.temperature)) {
      html +=
          "<footer>temperature " + format_number(*sample.temperature, Unit::kPlain) + "; the prompt is bold</footer>";
    }
    html += "</blockquote>";
  }
  page.add(html + "</div>");
}

std::string render_report(const RunRecord& run) {
  Page page(run.name);
  add_header(page, run);
  page.section("Learning");
  add_loss(page, run);
  add_compression(page, run);
  add_experts(page, run);
  page.section("Stability and speed");
  add_gradient_norm(page, run);
  add_speed(page, run);
  page.section("Memory and depth");
  add_decays(page, run);
  add_depth_weights(page, run);
  add_state_bytes(page, run);
  add_samples(page, run);
  return page.html();
}

}  // namespace furlong::report

namespace furlong {

void write_report(const std::filesystem::path& run_folder, const std::filesystem::path& out) {
  write_file_atomic(out, report::render_report(report::read_run(run_folder)));
}

}  // namespace furlong
