#pragma once

// Plain arguments of the CPU kernels: pointers and strides, no tensors.
//   N packed tokens   B sequences   H heads   K key size   V value size   C rows of a chunk

#include <cstdint>
#include <utility>
#include <vector>

namespace furlong::kda {

// Rows whose decays share one offset. A bounded gate (decay_log > -5) spans at most 8 * 5 = 40 nats on either side of
// the block's middle row, so that both factors of exp(G_i - G_j) stay within fp32.
constexpr int64_t kBlockRows = 16;
constexpr int64_t kChunkRows = 32;
constexpr int64_t kMaxBlocks = kChunkRows / kBlockRows;

/// [N, H, columns] with contiguous columns.
template <typename T>
struct TokenRows {
  T* data;
  int64_t token_stride;
  int64_t head_stride;
  T* at(int64_t n, int64_t h) const { return data + n * token_stride + h * head_stride; }
};

struct ChunkSizes {
  int64_t sequences, heads, key_size, value_size;
  double scale;
};

template <typename T>
struct ChunkInputs {
  ChunkSizes size;
  const int64_t* offsets;       // [B + 1]
  const int64_t* first_chunks;  // [B], index of a sequence's first chunk among all chunks
  TokenRows<const T> q, k, v;   //
  TokenRows<const float> decay_log;
  TokenRows<const float> beta;  // one column
  const float* initial_state;   // [B, H, K, V] or null
};

template <typename T>
struct ChunkOutputs {
  TokenRows<T> out;
  float* final_state;      // [B, H, K, V]
  float* entering_states;  // [chunks, H, K, V] or null: the state that enters each chunk, kept for the gradient
};

template <typename T>
struct ChunkGradients {
  TokenRows<const T> d_out;
  const float* d_final_state;    // [B, H, K, V] or null
  const float* entering_states;  // [chunks, H, K, V]
  TokenRows<T> d_q, d_k, d_v;
  TokenRows<float> d_decay_log;
  TokenRows<float> d_beta;
  float* d_initial_state;  // [B, H, K, V] or null
};

/// One sequence, one head and a range of value columns: what one thread works through chunk by chunk.
struct ChunkTask {
  int64_t sequence, head, first_value, num_values;
};

/// Tasks for each worker, by falling length to the least loaded one. Which worker runs a task changes no result.
std::vector<std::vector<ChunkTask>> plan_tasks(const ChunkSizes& size, const int64_t* offsets, int64_t workers,
                                               bool split_values);

inline int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace furlong::kda
