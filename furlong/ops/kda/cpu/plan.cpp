#include <algorithm>
#include <numeric>

#include "furlong/ops/kda/cpu/args.h"

namespace furlong::kda {

/// Heads of a task: as many as leave the workers evenly loaded.
int64_t task_heads(const ChunkSizes& size, const int64_t* offsets, int64_t longest, int64_t workers) {
  int64_t group = std::min(size.heads, kMostTaskHeads);
  const auto fits = [&] {
    const bool even = size.heads % group == 0 && size.sequences * (size.heads / group) % workers == 0;
    return even && longest * group * workers <= offsets[size.sequences] * size.heads;
  };
  while (group > 1 && !fits()) --group;
  return std::max<int64_t>(group, 1);
}

std::vector<std::vector<ChunkTask>> plan_tasks(const ChunkSizes& size, const int64_t* offsets, int64_t workers) {
  std::vector<int64_t> order(size.sequences);
  std::iota(order.begin(), order.end(), 0);
  const auto length = [&](int64_t b) { return offsets[b + 1] - offsets[b]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length(a) > length(b); });
  std::vector<std::vector<ChunkTask>> plan(std::max<int64_t>(workers, 1));
  std::vector<int64_t> load(plan.size(), 0);
  const int64_t group = size.sequences == 0 ? 1 : task_heads(size, offsets, length(order.front()), workers);
  for (const int64_t b : order) {
    for (int64_t h = 0; h < size.heads; h += group) {
      const auto worker = std::min_element(load.begin(), load.end()) - load.begin();
      plan[worker].push_back({b, h, 0, size.value_size, group});
      load[worker] += length(b) + kChunkRows;
    }
  }
  return plan;
}

}  // namespace furlong::kda
