#pragma once

// Stages in optimizer steps.

#include <cstdint>
#include <vector>

#include "furlong/train/config.h"

namespace furlong {

class StagePlan {
 public:
  explicit StagePlan(const std::vector<StageConfig>& stages);

  int64_t num_stages() const { return static_cast<int64_t>(first_step_.size()) - 1; }
  int64_t total_steps() const { return first_step_.back(); }
  int64_t total_tokens() const { return total_tokens_; }
  /// Stage of a 0-based step below total_steps().
  int64_t stage_of(int64_t step) const;
  int64_t first_step(int64_t stage) const { return first_step_[stage]; }
  int64_t num_steps(int64_t stage) const { return first_step_[stage + 1] - first_step_[stage]; }
  bool is_last_of_stage(int64_t step) const { return step + 1 == first_step_[stage_of(step) + 1]; }

 private:
  std::vector<int64_t> first_step_{0};  // of each stage, and the end
  int64_t total_tokens_ = 0;
};

}  // namespace furlong
