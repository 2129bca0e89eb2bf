#pragma once

// Two decoders on the same tokens: where their hidden states part, where their routers choose other experts and by what
// margin, and what that does to the logits.
//   N tokens   D hidden   V vocabulary   A chosen experts

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "furlong/model/decoder.h"

namespace furlong {

/// One layer. Differences are max|a - b| / max|b| over the tensor; cosines are per token.
struct LayerComparison {
  double difference = 0;  // of the residual stream after the layer
  double median_cosine = 1;
  int64_t flipped_tokens = 0;  // whose set of experts differs
  double largest_margin = 0;   // among them, in a: last chosen minus first not chosen biased score; 0 without flips
};

/// The first place where routers disagree: the cause of what follows. Earlier layers first, then earlier tokens.
struct RoutingFlip {
  int64_t layer = 0, token = 0;
  double margin = 0;  // in a
};

struct Comparison {
  std::vector<LayerComparison> layers;
  std::optional<RoutingFlip> first_flip;
  int64_t tokens = 0;
  int64_t tokens_with_flips = 0;  // in some layer
  double logit_difference = 0, median_cosine = 1, smallest_cosine = 1;
  double mean_divergence = 0;  // KL(a || b) of the next-token distributions, nats
  int64_t other_argmax = 0;    // tokens with another likeliest successor
};

/// One sequence, from its first token. UsageError when the decoders have different widths, depths or vocabularies, or
/// choose another number of experts.
Comparison compare_decoders(const Decoder& a, const Decoder& b, const at::Tensor& tokens_N, Numerics numerics);

}  // namespace furlong
