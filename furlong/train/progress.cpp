#include "furlong/train/progress.h"

#include <fmt/format.h>

namespace furlong {

namespace {

constexpr size_t kRecentSteps = 50;
constexpr int kBarWidth = 24;

}  // namespace

std::string duration_text(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole >= 3600) return fmt::format("{}h{:02}m", whole / 3600, whole % 3600 / 60);
  if (whole >= 60) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}s", whole);
}

void Progress::print(const std::string& text) {
  if (out_ == nullptr) return;
  std::fwrite(text.data(), 1, text.size(), out_);
  std::fflush(out_);
}

void Progress::start(int64_t first_step, int64_t total_steps, int64_t total_tokens) {
  total_steps_ = total_steps;
  total_tokens_ = total_tokens;
  message(fmt::format("training: {} of {} steps to go, {} tokens in all", total_steps - first_step, total_steps,
                      total_tokens));
}

void Progress::step(const StepMetrics& metrics) {
  recent_.emplace_back(metrics.outcome.tokens, metrics.seconds);
  if (recent_.size() > kRecentSteps) recent_.pop_front();
  int64_t tokens = 0;
  double seconds = 0.0;
  for (const auto& [step_tokens, step_seconds] : recent_) {
    tokens += step_tokens;
    seconds += step_seconds;
  }
  const double rate = static_cast<double>(tokens) / (seconds > 0.0 ? seconds : 1e-9);
  const double left = static_cast<double>(total_tokens_ - metrics.tokens_total) / rate;
  const std::string text =
      fmt::format("step {}/{}  {} {}  loss {:.4f}  grad {:.3f}  MaxVio {:.2f}  {:.0f} tok/s  {} left", metrics.step,
                  total_steps_, metrics.stage, metrics.context, metrics.outcome.loss, metrics.outcome.grad_norm,
                  metrics.max_violation(), rate, duration_text(left));
  if (terminal_) {
    const int filled = static_cast<int>(kBarWidth * metrics.step / total_steps_);
    print(fmt::format("\r\x1b[K[{}{}] {}", std::string(filled, '#'), std::string(kBarWidth - filled, '.'), text));
    bar_drawn_ = true;
  } else if (metrics.step % every_ == 0 || metrics.step == total_steps_) {
    print(text + "\n");
  }
}

void Progress::message(const std::string& line) {
  print(fmt::format("{}{}\n", bar_drawn_ ? "\r\x1b[K" : "", line));
  bar_drawn_ = false;
}

void Progress::finish() {
  if (bar_drawn_) print("\n");
  bar_drawn_ = false;
}

}  // namespace furlong
