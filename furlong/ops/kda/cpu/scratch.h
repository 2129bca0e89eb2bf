#pragma once

// Working memory of one thread for one chunk, carved out of one aligned allocation. K and V are padded to multiples of
// 16; R = kChunkRows.

#include <cstdint>

#include "furlong/ops/kda/cpu/args.h"
#include "hwy/aligned_allocator.h"

namespace furlong::kda {

struct ChunkScratch {
  int64_t K, V;
  static constexpr int64_t score_stride = kChunkRows, score_rows = kMaxBlocks * 2 * kBlockRows;

  float *q, *k, *v, *g, *beta;       // [R, K], [R, K], [R, V], [R, K], [R]
  float *row, *to_end;               // [R, K]
  float *to_offset, *total, *start;  // [blocks, K]
  float* whole;                      // [K]
  float *columns, *rights;           // block I: [16 (I + 1), K], see column(), right()
  float* lefts;                      // block I: [32, K]
  float *from_start, *at_end;        // [2R, K], [R, K]
  float* turned;                     // a transposed operand: [K, R], [V, R], [V, K]
  float* all_scores;                 // block I: [32, R]
  float *correction, *written;       // [R, V]
  float* state;                      // [K, V] for each head of a task
  float* product;                    // [2R, V]
  float *pair_sum, *pair_decay;      // [K]
  bool* pairwise;                    // [blocks]

  // Gradient only.
  float* d_scores;                        // as all_scores
  float *d_written, *residual;            // [R, V], [2R, V], the upper half of residual is d_out
  const float* entering;                  // the entering state [K, V], in place where it was kept
  float *d_state, *state_turned;          // [K, V] for each head of a task, [V, K]
  float *d_from_start, *d_at_end;         // [2R, K], [R, K]
  float *d_left, *d_right;                // [32, K], [R, K]
  float *d_q, *d_k, *d_v, *d_g, *d_beta;  // [R, K], [R, K], [R, V], [R, K], [R]
  float *end_sum, *d_diagonal;            // [K]

  /// The same memory with the states of head i of a task.
  ChunkScratch of_head(int64_t i) const {
    ChunkScratch s = *this;
    s.state += i * K * V;
    if (s.d_state != nullptr) s.d_state += i * K * V;
    return s;
  }

  /// The same memory from a value column on, as far as the walk of the gradient uses it.
  ChunkScratch from_value(int64_t column) const {
    ChunkScratch s = *this;
    for (float** rows : {&s.d_state, &s.d_written, &s.d_v, &s.residual}) *rows += column;
    return s;
  }

  float* column(int64_t block) const { return columns + packed_rows(block) * K; }
  float* right(int64_t block) const { return rights + packed_rows(block) * K; }
  float* left(int64_t block) const { return lefts + block * 2 * kBlockRows * K; }
  float* scores(int64_t block) const { return all_scores + block * 2 * kBlockRows * score_stride; }
  float* d_score(int64_t block) const { return d_scores + block * 2 * kBlockRows * score_stride; }

  /// Rows of the triangular stack before block I: 16 (1 + ... + I).
  static constexpr int64_t packed_rows(int64_t block) { return kBlockRows * block * (block + 1) / 2; }
};

/// Owns the memory of a ChunkScratch.
class ChunkMemory {
 public:
  ChunkMemory(int64_t K, int64_t V, bool gradient);
  const ChunkScratch& scratch() const { return scratch_; }

 private:
  void carve(float* base, int64_t& used, bool gradient);

  ChunkScratch scratch_ = {};
  bool pairwise_[kMaxBlocks] = {};
  hwy::AlignedFreeUniquePtr<float[]> memory_;
};

}  // namespace furlong::kda
