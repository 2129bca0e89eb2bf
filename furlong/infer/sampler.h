#pragma once

// Draws the next token from one row of logits.
//   V vocabulary

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace furlong {

struct SamplingOptions {
  double temperature = 1.0;  // 0: the most likely token
  double top_p = 1.0;        // draw among the smallest set of most likely tokens whose mass reaches this
  uint64_t seed = 0;

  /// UsageError when a value makes no sense.
  void validate() const;
};

struct Sample {
  int64_t id = 0;
  double log_probability = 0.0;  // of `id` under the full distribution at the given temperature (1 where it is 0)
};

/// `index` counts the draws of a sequence: (seed, index) decide the random number, so that a continued sequence draws
/// what an uninterrupted one would have. logits_V: fp32 on any device; ties go to the lowest id.
Sample sample_token(const at::Tensor& logits_V, const SamplingOptions& options, uint64_t index);

}  // namespace furlong
