#pragma once

// How a run is going, for people: a bar with rate and time left on a terminal, plain lines elsewhere.

#include <cstdint>
#include <cstdio>
#include <deque>
#include <string>
#include <utility>

#include "furlong/train/metrics.h"

namespace furlong {

/// "5h12m", "3m07s", "42s".
std::string duration_text(double seconds);

class Progress {
 public:
  /// `out` null: silent. `every`: steps between lines where there is no terminal.
  Progress(std::FILE* out, bool terminal, int64_t every) : out_(out), terminal_(terminal), every_(every) {}

  void start(int64_t first_step, int64_t total_steps, int64_t total_tokens);
  void step(const StepMetrics& metrics);
  /// A line of its own: a stage begins, a step is skipped, a checkpoint is damaged.
  void message(const std::string& line);
  void finish();

 private:
  void print(const std::string& text);

  std::FILE* out_;
  bool terminal_;
  int64_t every_;
  int64_t total_steps_ = 0, total_tokens_ = 0;
  std::deque<std::pair<int64_t, double>> recent_;  // tokens and seconds of the last steps
  bool bar_drawn_ = false;
};

}  // namespace furlong
