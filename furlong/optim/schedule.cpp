#include "furlong/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "furlong/base/error.h"

namespace furlong {

double Schedule::lr(int64_t step, int64_t total_steps) const {
  const double warmup = std::max(1.0, std::round(warmup_ratio * static_cast<double>(total_steps)));
  const auto position = static_cast<double>(step);
  if (position < warmup) return peak_lr * (position + 1.0) / warmup;
  const double floor_lr = peak_lr * final_lr_ratio;
  if (kind == "constant") return peak_lr;
  const double decay_start =
      kind == "wsd" ? std::max(warmup, (1.0 - decay_ratio) * static_cast<double>(total_steps)) : warmup;
  if (position < decay_start) return peak_lr;
  const double progress =
      std::min(1.0, (position - decay_start) / std::max(1.0, static_cast<double>(total_steps) - decay_start));
  if (kind == "wsd") return peak_lr + (floor_lr - peak_lr) * progress;
  if (kind == "cosine") return floor_lr + (peak_lr - floor_lr) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  throw ConfigError("schedule.kind is '" + kind + "', must be one of: cosine, wsd, constant");
}

}  // namespace furlong
