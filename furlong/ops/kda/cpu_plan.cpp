#include <algorithm>
#include <numeric>

#include "furlong/ops/kda/cpu_args.h"

namespace furlong::kda {

std::vector<std::vector<ChunkTask>> plan_tasks(const ChunkSizes& size, const int64_t* offsets, int64_t workers,
                                               bool split_values) {
  // The columns of the state are independent: with fewer heads than workers, strips of columns share one head's
  // key-side work redundantly. Strips stay at 16 columns or more, the width of a product's tile.
  const int64_t whole = std::max<int64_t>(size.sequences * size.heads, 1);
  const int64_t most = split_values ? std::max<int64_t>(size.value_size / kBlockRows, 1) : 1;
  const int64_t strips = std::clamp<int64_t>((workers + whole - 1) / whole, 1, most);
  const int64_t width = round_up((size.value_size + strips - 1) / strips, kBlockRows);

  std::vector<int64_t> order(size.sequences);
  std::iota(order.begin(), order.end(), 0);
  const auto length = [&](int64_t b) { return offsets[b + 1] - offsets[b]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length(a) > length(b); });
  std::vector<std::vector<ChunkTask>> plan(std::max<int64_t>(workers, 1));
  std::vector<int64_t> load(plan.size(), 0);
  for (const int64_t b : order) {
    for (int64_t h = 0; h < size.heads; ++h) {
      for (int64_t v = 0; v < size.value_size; v += width) {
        const auto worker = std::min_element(load.begin(), load.end()) - load.begin();
        plan[worker].push_back({b, h, v, std::min(width, size.value_size - v)});
        load[worker] += length(b) + kChunkRows;
      }
    }
  }
  return plan;
}

}  // namespace furlong::kda
