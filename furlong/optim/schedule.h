#pragma once

#include <cstdint>
#include <string>

namespace furlong {

/// Learning-rate schedule over a whole run (all stages), in steps.
struct Schedule {
  std::string kind = "cosine";  // "cosine", "wsd" (warm-up, stable, linear decay) or "constant"
  double peak_lr = 1e-3;
  double final_lr_ratio = 0.1;  // rate at the end, relative to the peak
  double warmup_ratio = 0.01;   // linear warm-up, share of all steps (at least one step)
  double decay_ratio = 0.2;     // wsd: share of all steps spent decaying

  /// Rate of step `step` (0-based) of `total_steps`.
  double lr(int64_t step, int64_t total_steps) const;
};

}  // namespace furlong
