#pragma once

// Loss by position in the context, in buckets [0, 1), [1, 2), [2, 4), [4, 8), ... of the input token's position.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

#include "furlong/base/json.h"

namespace furlong {

class PositionLoss {
 public:
  void add(int64_t position, double nats);
  /// Sequences of `layout` start at offsets_host; `first_position` is added to the place in each.
  void add(const at::Tensor& nll_N, const at::Tensor& weight_N, const at::Tensor& offsets_host,
           int64_t first_position = 0);
  /// {"first": [...], "loss": [...], "targets": [...]}, up to the last bucket that has targets; loss null where none.
  OrderedJson to_json() const;

 private:
  static constexpr int kBuckets = 42;
  std::array<double, kBuckets> nats_{};
  std::array<int64_t, kBuckets> targets_{};
};

}  // namespace furlong
