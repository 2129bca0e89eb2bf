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

// What the forward keeps of a chunk and head: the entering state [K, V], then each row's correction u [kChunkRows, V].
inline int64_t kept_rows(int64_t key_size) {
  return key_size + kChunkRows;
}

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

// Heads that one task may take through each chunk in turn: rows of neighbouring heads share memory pages.
constexpr int64_t kMostTaskHeads = 4;

/// One sequence, `heads` heads from `head` on and a range of value columns: what one thread works through chunk by
/// chunk.
struct ChunkTask {
  int64_t sequence, head, first_value, num_values;
  int64_t heads = 1;
  ChunkTask of_head(int64_t i) const { return {sequence, head + i, first_value, num_values}; }
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
  float* final_state;  // [B, H, K, V]
  float* kept;         // [chunks, H, K + kChunkRows, V] or null: what the gradient needs of each chunk
};

template <typename T>
struct ChunkGradients {
  TokenRows<const T> d_out;
  const float* d_final_state;  // [B, H, K, V] or null
  const float* kept;           // as in ChunkOutputs
  TokenRows<T> d_q, d_k, d_v;
  TokenRows<float> d_decay_log;
  TokenRows<float> d_beta;
  float* d_initial_state;  // [B, H, K, V] or null
  bool past_caches;        // the gradients are too large to be read from a cache later
  const float* kept_of(const ChunkInputs<T>& in, const ChunkTask& task, int64_t chunk) const {
    const int64_t index = (in.first_chunks[task.sequence] + chunk) * in.size.heads + task.head;
    return kept + index * kept_rows(in.size.key_size) * in.size.value_size;
  }
};

/// Tasks of whole width for each worker, by falling length to the least loaded one. Which worker runs a task changes no
/// result.
std::vector<std::vector<ChunkTask>> plan_tasks(const ChunkSizes& size, const int64_t* offsets, int64_t workers);

inline int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace furlong::kda
