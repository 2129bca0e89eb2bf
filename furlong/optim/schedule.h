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

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("kind", kind, {.doc = "form of the decay", .one_of = {"cosine", "wsd", "constant"}});
    visit("peak_lr", peak_lr, {.doc = "highest rate", .min = 1e-12, .max = 100.0});
    visit("final_lr_ratio", final_lr_ratio, {.doc = "rate at the end, relative to the peak", .min = 0.0, .max = 1.0});
    visit("warmup_ratio", warmup_ratio, {.doc = "linear warm-up, share of all steps", .min = 0.0, .max = 1.0});
    visit("decay_ratio", decay_ratio, {.doc = "wsd: share of all steps spent decaying", .min = 0.0, .max = 1.0});
  }
};

}  // namespace furlong
