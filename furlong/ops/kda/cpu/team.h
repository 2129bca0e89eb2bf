#pragma once

// Threads that walk one (sequence, head) together: each owns a strip of value columns of the state, and they share the
// work that knows no values (decays, scores) chunk by chunk. In the gradient they also share, chunk by chunk, all that
// follows once the walk has left d_state at every chunk's end. What is computed does not depend on the members.

#include <atomic>
#include <memory>

#include "furlong/ops/kda/cpu/scratch.h"
#include "hwy/cache_control.h"

namespace furlong::kda {

/// A number that one thread raises and others wait for. Waiting spins for about as long as it takes to wake a sleeping
/// thread, then sleeps.
class alignas(64) Progress {
 public:
  void reset() { count_.store(0, std::memory_order_relaxed); }
  /// Publishes what this thread has written so far. The full order keeps a waiter from going to sleep unseen.
  void raise() {
    count_.fetch_add(1);
    count_.notify_all();
  }
  void wait_for(int64_t least) const {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (count_.load(std::memory_order_acquire) >= least) return;
      hwy::Pause();
    }
    for (uint32_t now; (now = count_.load()) < least;) count_.wait(now);
  }

 private:
  static constexpr int kSpins = 2000;

  std::atomic<uint32_t> count_{0};
};

/// Chunks are counted in the order of the walk and belong to the members in turn. A chunk is made by its owner, two
/// rounds of chunks ahead, then walked by all, and in the gradient finished by its owner, a round behind: members may
/// run a round apart before one of them waits. Slots hold what is shared of a chunk, and in the gradient what its owner
/// keeps until it is finished.
class ChunkTeam {
 public:
  ChunkTeam(int64_t K, int64_t V, int64_t members, bool gradient);

  bool fits(int64_t K, int64_t V, int64_t members) const { return K == K_ && V == V_ && members == members_; }
  /// Before the members start.
  void reset();

  int64_t members() const { return members_; }
  void set_made(int64_t member) { made_[member].raise(); }
  void set_walked(int64_t member) { walked_[member].raise(); }
  void wait_made(int64_t chunk) const { made_[chunk % members_].wait_for(chunk / members_ + 1); }
  void wait_walked(int64_t chunk) const {
    for (int64_t member = 0; member < members_; ++member) walked_[member].wait_for(chunk + 1);
  }

  /// `s` with a chunk's part in the team's memory.
  ChunkScratch at(ChunkScratch s, int64_t chunk) const;
  /// The same for its owner while it makes the chunk: what it reads again while it does so is still that of `s`.
  ChunkScratch unshared(const ChunkScratch& s, int64_t chunk) const;
  /// d_state at the chunk's end; that of the next chunk is where the walk leaves it.
  float* d_state(int64_t chunk) const { return d_states_ + chunk % (slots() + 1) * K_ * V_; }

 private:
  static constexpr int64_t kRounds = 3;

  int64_t slots() const { return kRounds * members_; }
  int64_t place(ChunkScratch& s, float* slot) const;

  int64_t K_, V_, members_;
  bool gradient_;
  int64_t slot_floats_;
  hwy::AlignedFreeUniquePtr<float[]> memory_;
  float* d_states_;
  std::unique_ptr<bool[]> pairwise_;
  std::unique_ptr<Progress[]> made_, walked_;  // of each member, in chunks
};

}  // namespace furlong::kda
