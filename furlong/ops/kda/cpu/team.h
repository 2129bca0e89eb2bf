#pragma once

// Threads that walk one (sequence, head) together: each owns a strip of value columns of the state, and they share the
// work that knows no values (decays, scores) chunk by chunk. In the gradient they also share, chunk by chunk, all that
// follows once the walk has left d_state at every chunk's end. What is computed does not depend on the members.

#include <atomic>
#include <memory>

#include "furlong/ops/kda/cpu/scratch.h"
#include "hwy/cache_control.h"

namespace furlong::kda {

/// For members that arrive within microseconds of one another: spins for about as long as it takes to wake a sleeping
/// thread, then sleeps.
class TeamBarrier {
 public:
  explicit TeamBarrier(int64_t members) : members_(members), missing_(members) {}

  void wait() {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      missing_.store(members_, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    for (int spins = 0; spins < kSpins; ++spins) {
      if (round_.load(std::memory_order_acquire) != round) return;
      hwy::Pause();
    }
    round_.wait(round, std::memory_order_acquire);
  }

 private:
  static constexpr int kSpins = 2000;

  const int64_t members_;
  alignas(64) std::atomic<int64_t> missing_;
  alignas(64) std::atomic<uint32_t> round_{0};
};

/// A segment is what the team does between two rounds of waiting: some chunks of each member. Chunks are counted in the
/// order of the walk. Slots hold what members read of one another's chunks: in the forward two segments, one being read
/// and one being made; in the gradient one.
class ChunkTeam {
 public:
  static constexpr int64_t kChunksPerMember = 2;

  ChunkTeam(int64_t K, int64_t V, int64_t members, bool gradient);

  bool fits(int64_t K, int64_t V, int64_t members) const { return K == K_ && V == V_ && members == members_; }
  /// Of a segment.
  int64_t chunks() const { return members_ * kChunksPerMember; }
  void wait() { barrier_.wait(); }

  /// `s` with what members share of a chunk in the team's memory.
  ChunkScratch at(ChunkScratch s, int64_t chunk) const;
  /// d_state at the chunk's end; that of the next chunk is where the walk leaves it.
  float* d_state(int64_t chunk) const { return d_states_ + chunk % (chunks() + 1) * K_ * V_; }

 private:
  int64_t slots() const { return gradient_ ? chunks() : 2 * chunks(); }
  int64_t place(ChunkScratch& s, float* slot) const;

  int64_t K_, V_, members_;
  bool gradient_;
  TeamBarrier barrier_;
  hwy::AlignedFreeUniquePtr<float[]> memory_;
  float* d_states_ = nullptr;
  std::unique_ptr<bool[]> pairwise_;
};

}  // namespace furlong::kda
