#pragma once

// Chunks prepared by the whole machine for the few blocks that walk.
//
// A task is a span of chunks of one head: prepared once, walked by one block for every 64 value columns, and in a map
// by two more for M. Items (task, chunk) count chunk by chunk over all tasks; preparing groups draw tickets for them. A
// prepared chunk goes to a slot of its task's ring in device memory (in fact L2: a slot is written anew as soon as it
// was read) and is then flagged in `ready`; the walking block fetches it into a stage of its shared memory and says in
// `fetched` how many it has. All blocks run at once (cooperative launch). Nobody waits in a circle: the unfinished item
// that is first in order is in somebody's hands, and its slot is free as soon as those before it were fetched.
//
// Who prepares a chunk changes nothing in it: results do not depend on the number of blocks or on timing.

#include "furlong/ops/kda/cuda/layout.cuh"

namespace furlong::kda::cuda {

struct PoolHeader {
  int tasks, walkers;
  int least_chunks, most_chunks;  // of a task
  int tickets;                    // drawn
};

struct Walker {
  Walk walk;
  int task, rank;  // rank: number of split sequences before this one
  int matrix;      // walks for M
};

struct Pool {
  PoolHeader* header = nullptr;
  Span* spans = nullptr;   // [tasks]
  Walker* all = nullptr;   // [walkers]
  int* fetched = nullptr;  // [walkers, kFlagStep] chunks whose slots may be written anew
  int* ready = nullptr;    // [tasks, ready_step] last chunk in each slot, + 1
  char* ring = nullptr;    // [tasks, slots] prepared chunks
  int slots = 0;           // of a task
  int ready_step = 0;
  int max_tasks = 0;  // room in the tables
};

/// Flags that many poll lie in lines of their own: hundreds of polls of one line hold up everybody.
inline constexpr int kFlagStep = 32;

struct PoolItem {
  int task, chunk;
};

__device__ __forceinline__ int draw_ticket(const Pool& pool) {
  return atomicAdd(&pool.header->tickets, 1);
}
/// The item of a ticket; draws more while its task has no such chunk. chunk >= most_chunks: there are no more.
__device__ __forceinline__ PoolItem item_of(const Pool& pool, int ticket) {
  const PoolHeader& header = *pool.header;
  for (;;) {
    const PoolItem item = {ticket % header.tasks, ticket / header.tasks};
    if (item.chunk < header.least_chunks || item.chunk >= header.most_chunks ||
        item.chunk < pool.spans[item.task].chunks) {
      return item;
    }
    ticket = draw_ticket(pool);
  }
}

/// Two warps of a walking block that fill the stages of its shared memory.
template <typename Shape, bool kMap>
struct Fetcher {
  const Pool& pool;
  const Walker& walker;
  uint32_t shared;
  int thread;
  int known = 0;  // chunks that are ready for sure

  /// Asks for the flags of the next 32 chunks. By the first warp.
  __device__ void look() {
    const int chunk = known + thread;
    const bool ready = chunk < walker.walk.chunks &&
                       load_acquire(pool.ready + walker.task * pool.ready_step + chunk % pool.slots) == chunk + 1;
    const uint32_t missing = ~__ballot_sync(0xffffffffu, ready);
    const int found = missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1;
    known += found;
    if (found == 0) __nanosleep(100);
    __syncwarp();
    proxy_fence();
  }

  __device__ void copy_prepared(int chunk, uint32_t stage, uint32_t full) const {
    const int64_t slot = static_cast<int64_t>(walker.task) * pool.slots + chunk % pool.slots;
    const char* from = pool.ring + slot * Stage::kPrepared;
    if (kMap) {
      phase_announce(full, Stage::kQuery + Stage::kProbability - Stage::kDecay);
      bulk_copy(stage, from, Stage::kQuery, full);
      bulk_copy(stage + Stage::kDecay, from + Stage::kDecay, Stage::kProbability - Stage::kDecay, full);
    } else {
      phase_announce(full, Stage::kPrepared);
      bulk_copy(stage, from, Stage::kPrepared, full);
    }
  }

  /// The copy engine brings what was prepared, asked by one lane; the rows of v come by ordinary asynchronous copies.
  __device__ void run(const Inputs& in) {
    const Walk& walk = walker.walk;
    const int64_t row_bytes = in.v_NHV.token_stride * 2;
    const char* values = static_cast<const char*>(in.v_NHV.data) + walk.first_token * row_bytes +
                         walk.head * in.v_NHV.head_stride * 2 + walk.slice * Shape::kColumns * 2;
    for (int chunk = 0; chunk < walk.chunks; ++chunk, values += kChunk * row_bytes) {
      const int slot = chunk % Shape::kStages;
      const uint32_t full = shared + Shape::kPhaseBase + slot * 16, stage = shared + slot * Shape::Ring::kBytes;
      if (chunk >= Shape::kStages) phase_wait(full + 8, (chunk / Shape::kStages - 1) & 1);
      if (thread < 32) {
        if (thread == 0 && chunk >= Shape::kStages) {
          store_relaxed(pool.fetched + blockIdx.x * kFlagStep, chunk - Shape::kStages + 1);
        }
        while (known <= chunk) look();
        if (thread == 0) copy_prepared(chunk, stage, full);
      }
      // The slice of a map's matrix part lies past the columns of v, which are not read then.
      const int rows = walker.matrix ? 0 : min(kChunk, walk.tokens - chunk * kChunk);
      copy_rows<Shape::kColumns * 2, Shape::kCarryThreads>(stage + Shape::Ring::kValue, value_at<Shape::kColumns>,
                                                           values, row_bytes, rows, thread);
      phase_arrive_after_copies(full);
    }
  }
};

}  // namespace furlong::kda::cuda
