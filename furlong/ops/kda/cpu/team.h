#pragma once

// Threads that walk one (sequence, head) together: each owns a strip of value columns of the state, and they share the
// work that knows no values (decays, scores) chunk by chunk. What is computed does not depend on the members.

#include <barrier>

#include "furlong/ops/kda/cpu/scratch.h"

namespace furlong::kda {

class ChunkTeam {
 public:
  static constexpr int64_t kChunksPerMember = 2;

  ChunkTeam(int64_t K, int64_t members) : K_(K), members_(members), barrier_(members) {
    memory_ = hwy::AllocateAligned<float>(2 * chunks() * slot_floats());
  }

  /// Chunks of a segment; between two waits one segment is read and the next one prepared.
  int64_t chunks() const { return members_ * kChunksPerMember; }
  void wait() { barrier_.arrive_and_wait(); }

  /// `s` with what load_keys makes for a chunk held in the team's memory.
  ChunkScratch at(ChunkScratch s, int64_t segment, int64_t chunk) const {
    float* slot = memory_.get() + (segment % 2 * chunks() + chunk) * slot_floats();
    const auto take = [&](float*& pointer, int64_t floats) {
      pointer = slot;
      slot += floats;
    };
    take(s.from_start, 2 * kChunkRows * K_);
    take(s.at_end, kChunkRows * K_);
    take(s.all_scores, kScores);
    take(s.whole, K_);
    take(s.beta, kChunkRows);
    return s;
  }

 private:
  static constexpr int64_t kScores = kMaxBlocks * 2 * kBlockRows * ChunkScratch::score_stride;
  int64_t slot_floats() const { return round_up(3 * kChunkRows * K_ + kScores + K_ + kChunkRows, 16); }

  int64_t K_, members_;
  std::barrier<> barrier_;
  hwy::AlignedFreeUniquePtr<float[]> memory_;
};

}  // namespace furlong::kda
