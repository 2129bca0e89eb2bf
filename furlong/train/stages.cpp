#include "furlong/train/stages.h"

#include <algorithm>

namespace furlong {

StagePlan::StagePlan(const std::vector<StageConfig>& stages) {
  for (const StageConfig& stage : stages) {
    const int64_t per_step = stage.tokens_per_step();
    const int64_t steps = stage.steps ? *stage.steps : (*stage.tokens + per_step - 1) / per_step;
    first_step_.push_back(first_step_.back() + steps);
    total_tokens_ += steps * per_step;
  }
}

int64_t StagePlan::stage_of(int64_t step) const {
  return std::upper_bound(first_step_.begin(), first_step_.end(), step) - first_step_.begin() - 1;
}

}  // namespace furlong
