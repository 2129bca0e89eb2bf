#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace furlong::kda {

/// Rows of one gate call; columns = H K. The gradient fields are null in a forward call.
template <typename T>
struct GateRows {
  bool bounded;
  float lower_bound;  // of the bounded gate
  int64_t columns;
  const T* z;
  const float* a;        // [columns], exp(a_log) of the column's head
  const float* dt_bias;  // [columns]
  float* decay_log;
  const float* d_decay_log;
  T* d_z;
};

void gate_forward(const GateRows<float>& in, int64_t first, int64_t last);
void gate_forward(const GateRows<c10::BFloat16>& in, int64_t first, int64_t last);
/// Also adds the rows' sums to d_dt_bias and d_a_log, [columns] each.
void gate_backward(const GateRows<float>& in, int64_t first, int64_t last, float* d_dt_bias, float* d_a_log);
void gate_backward(const GateRows<c10::BFloat16>& in, int64_t first, int64_t last, float* d_dt_bias, float* d_a_log);

}  // namespace furlong::kda
