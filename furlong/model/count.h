#pragma once

// Sizes and costs of an architecture, from its parameter list alone.

#include "furlong/model/config.h"

namespace furlong {

struct ModelCount {
  double parameters = 0;         // all
  double active_parameters = 0;  // per token: k of E experts; output head included, embedding lookup not
  double embedding_parameters = 0;
  double routed_expert_parameters = 0;
  double flops_per_token = 0;        // forward, matmul: 2 * active (attention over context excluded)
  double kda_flops_per_token = 0;    // recurrence, 7 K V a head
  double state_bytes = 0;            // per sequence: recurrent states fp32
  double conv_state_bytes = 0;       // per sequence, bf16
  double cache_bytes_per_token = 0;  // latent caches, bf16
};

ModelCount count(const ModelConfig& config);

}  // namespace furlong
