#pragma once

#include <cstdint>
#include <vector>

#include "furlong/ops/kda/cpu/args.h"

namespace furlong::kda {

/// Arguments of kda_step_: B tokens, one of each sequence.
template <typename T>
struct StepArguments {
  int64_t heads, key_size, value_size;
  float scale;
  TokenRows<const T> q, k, v;
  TokenRows<const float> decay_log, beta;
  float* state;          // [S, H, K, V]
  const int64_t* slots;  // [B]
  TokenRows<T> out;
};

}  // namespace furlong::kda
