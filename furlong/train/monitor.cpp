#include "furlong/train/monitor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "furlong/base/error.h"

namespace furlong {

const char* Verdict::name() const {
  switch (kind) {
    case Kind::kSpike:
      return "spike";
    case Kind::kSkip:
      return "skip";
    default:
      return "ok";
  }
}

void SpikeWindow::add(double value) {
  if (!std::isfinite(value)) return;
  values_.push_back(value);
  if (count() > size_) values_.pop_front();
}

double SpikeWindow::limit(double sigma) const {
  double sum = 0.0;
  for (const double value : values_) sum += value;
  const double mean = sum / static_cast<double>(count());
  double squares = 0.0;
  for (const double value : values_) squares += (value - mean) * (value - mean);
  return mean + sigma * std::sqrt(squares / static_cast<double>(count()));
}

Json SpikeWindow::state() const {
  return Json(values_);
}

void SpikeWindow::restore(const Json& state, const std::string& where) {
  if (!state.is_array()) throw FormatError(where + ": the spike window is no array");
  values_.clear();
  for (const Json& value : state) {
    if (!value.is_number()) throw FormatError(where + ": the spike window holds something that is no number");
    add(value.get<double>());
  }
}

Verdict Monitor::judge(double loss, double grad_norm, const std::string& fault) {
  if (!fault.empty()) return {Verdict::Kind::kSkip, fault};
  if (!std::isfinite(loss)) return {Verdict::Kind::kSkip, "the loss is not finite"};
  if (!std::isfinite(grad_norm)) return {Verdict::Kind::kSkip, "the gradient is not finite"};
  Verdict verdict;
  const auto check = [&](const char* what, double value, const SpikeWindow& window) {
    if (window.count() < std::min(config_.min_samples, config_.window) || value <= window.limit(config_.sigma)) return;
    verdict.kind = config_.on_spike == "skip" ? Verdict::Kind::kSkip : Verdict::Kind::kSpike;
    verdict.reason +=
        fmt::format("{}{} {:.4g} above {:.4g} ({:g} sigma of {} steps)", verdict.reason.empty() ? "" : "; ", what,
                    value, window.limit(config_.sigma), config_.sigma, window.count());
  };
  check("loss", loss, loss_);
  check("gradient norm", grad_norm, grad_norm_);
  loss_.add(loss);
  grad_norm_.add(grad_norm);
  return verdict;
}

Json Monitor::state() const {
  return {{"loss", loss_.state()}, {"grad_norm", grad_norm_.state()}};
}

void Monitor::restore(const Json& state, const std::string& where) {
  if (!state.is_object() || !state.contains("loss") || !state.contains("grad_norm")) {
    throw FormatError(where + ": no spike windows");
  }
  loss_.restore(state["loss"], where);
  grad_norm_.restore(state["grad_norm"], where);
}

}  // namespace furlong
