#include "furlong/ops/moe/experts/pairs.h"

#include <algorithm>
#include <numeric>

#include "furlong/base/shape.h"

namespace furlong::moe_experts_detail {

Pairs sort_pairs(const at::Tensor& ids_NA, int64_t num_experts) {
  const at::Tensor ids = ids_NA.contiguous();
  const int64_t* expert_of_pair = ids.const_data_ptr<int64_t>();
  const int64_t num_pairs = ids.numel();
  Pairs pairs;
  pairs.num_chosen = ids.size(1);
  pairs.offset_of_expert.assign(num_experts + 1, 0);
  for (int64_t p = 0; p < num_pairs; ++p) {
    const int64_t expert = expert_of_pair[p];
    if (expert < 0 || expert >= num_experts) {
      throw UsageError("[moe_experts] ids_NA: got expert " + std::to_string(expert) + ", need 0 to " +
                       std::to_string(num_experts - 1));
    }
    ++pairs.offset_of_expert[expert + 1];
  }
  // Rounding up costs at most half of kRowMultiple rows an expert on average: under 13 % from here on.
  const int64_t multiple = num_pairs >= 4 * kRowMultiple * num_experts ? kRowMultiple : 1;
  for (int64_t& rows : pairs.offset_of_expert) rows = (rows + multiple - 1) / multiple * multiple;
  std::partial_sum(pairs.offset_of_expert.begin(), pairs.offset_of_expert.end(), pairs.offset_of_expert.begin());
  std::vector<int64_t> next(pairs.offset_of_expert.begin(), pairs.offset_of_expert.end() - 1);
  pairs.pair_of_place.assign(pairs.offset_of_expert.back(), kNoPair);
  pairs.place_of_pair.resize(num_pairs);
  for (int64_t p = 0; p < num_pairs; ++p) {
    const int64_t place = next[expert_of_pair[p]]++;
    pairs.pair_of_place[place] = p;
    pairs.place_of_pair[p] = place;
  }
  return pairs;
}

std::vector<RowBlock> row_blocks(const Pairs& pairs, int64_t max_rows) {
  std::vector<RowBlock> blocks;
  for (int64_t e = 0; e < pairs.num_experts(); ++e) {
    for (int64_t start = pairs.offset_of_expert[e]; start < pairs.offset_of_expert[e + 1]; start += max_rows) {
      blocks.push_back({e, start, std::min(max_rows, pairs.offset_of_expert[e + 1] - start)});
    }
  }
  return blocks;
}

}  // namespace furlong::moe_experts_detail
