#pragma once

// The (token, expert) pairs of a routing, sorted by expert, and the loop over one expert's rows at a time.
//   N tokens   A chosen   E experts   P places: the N A pairs, and empty places that round an expert's rows up
//
// Row counts of experts change with every call, and the bf16 products of the library compile and keep a kernel for each
// shape they meet. When experts have many rows, their counts are therefore rounded up to a multiple of kRowMultiple:
// 16 shapes instead of hundreds. Empty places hold zeros.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace furlong::moe_experts_detail {

constexpr int64_t kRowMultiple = 32;
constexpr int64_t kNoPair = -1;

/// Stable counting sort: within an expert, pairs stay in the order of tokens.
struct Pairs {
  std::vector<int64_t> pair_of_place;     // [P] which pair stands at a place, or kNoPair; its token is pair / A
  std::vector<int64_t> place_of_pair;     // [N A] the inverse
  std::vector<int64_t> offset_of_expert;  // [E + 1]
  int64_t num_chosen = 0;

  int64_t num_places() const { return static_cast<int64_t>(pair_of_place.size()); }
  int64_t num_experts() const { return static_cast<int64_t>(offset_of_expert.size()) - 1; }
  int64_t rows(int64_t expert) const { return offset_of_expert[expert + 1] - offset_of_expert[expert]; }
};

/// UsageError when an id is not below num_experts.
Pairs sort_pairs(const at::Tensor& ids_NA, int64_t num_experts);

/// Some rows of one expert.
struct RowBlock {
  int64_t expert, start, rows;
};

/// Every expert's rows in blocks of at most `max_rows`; experts without rows have none.
std::vector<RowBlock> row_blocks(const Pairs& pairs, int64_t max_rows);

}  // namespace furlong::moe_experts_detail
