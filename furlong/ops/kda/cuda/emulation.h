#pragma once

// Runs the kernels of this folder on the CPU, for tests on machines without a GPU: every thread of a block is a fiber,
// a block runs after the other. Warp collectives (matrix products, shuffles) meet in the warp, barriers in the block.
// Asynchronous copies arrive at the wait that covers them and poison their target until then; shared memory starts as
// NaN. Slow (about 0.1 s a block), functional only: it says nothing about time.
//
// Stands in for cuda/tile.cuh's machine part when that file is compiled without nvcc.

#include <cuda_bf16.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace furlong::kda::emulation {

struct Copy {
  void* to;
  const void* from;
  int bytes;  // 0 writes zeros
};

struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false;
  int index = 0;
  uint64_t collectives = 0;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

struct Warp {
  int arrived = 0;
  uint64_t generation = 0;
  float slots[2][32][16];
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<unsigned char> shared;
  int arrived = 0;
  uint64_t generation = 0;
  ucontext_t scheduler;
  Thread* running = nullptr;
  std::function<void()> body;
};

inline Block* block = nullptr;
struct Index {
  unsigned x = 0, y = 0, z = 0;
};
inline Index block_index, grid_size, block_size;

inline void yield() {
  Thread* self = block->running;
  swapcontext(&self->context, &block->scheduler);
}

inline void barrier() {
  const uint64_t mine = block->generation;
  if (++block->arrived == static_cast<int>(block->threads.size())) {
    block->arrived = 0;
    ++block->generation;
    return;
  }
  while (block->generation == mine) yield();
}

/// All 32 lanes leave n floats; returns what each lane left.
inline const float (*exchange(const float* values, int n))[16] {
  Thread* self = block->running;
  Warp& warp = block->warps[self->index / 32];
  auto* slots = warp.slots[self->collectives++ % 2];
  std::memcpy(slots[self->index % 32], values, n * sizeof(float));
  const uint64_t mine = warp.generation;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
  } else {
    while (warp.generation == mine) yield();
  }
  return slots;
}

inline void finish(const Copy& copy) {
  if (copy.bytes > 0) std::memcpy(copy.to, copy.from, copy.bytes);
  if (copy.bytes < 16) std::memset(static_cast<char*>(copy.to) + copy.bytes, 0, 16 - copy.bytes);
}

inline void entry() {
  block->body();
  block->running->done = true;
  swapcontext(&block->running->context, &block->scheduler);
}

/// One block from start to end; the last warp first if `backwards`.
inline void run_block(Block& state, size_t shared_bytes, bool backwards) {
  const int threads = static_cast<int>(state.threads.size());
  state.warps.assign((threads + 31) / 32, Warp{});
  state.shared.assign(shared_bytes + 1024, 0xff);
  state.arrived = 0;
  for (int t = 0; t < threads; ++t) {
    Thread& thread = state.threads[t];
    thread.done = false;
    thread.index = t;
    thread.collectives = 0;
    thread.groups.clear();
    thread.open.clear();
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, entry, 0);
  }
  int alive = threads;
  while (alive > 0) {
    alive = 0;
    for (int n = 0; n < threads; ++n) {
      Thread& thread = state.threads[backwards ? threads - 1 - n : n];
      if (thread.done) continue;
      state.running = &thread;
      swapcontext(&state.scheduler, &thread.context);
      alive += thread.done ? 0 : 1;
    }
  }
}

/// Runs kernel(args...) for all blocks of the grid. FURLONG_EMULATION_ORDER=1 lets the last warp run first.
template <typename Kernel, typename... Args>
void run(Kernel kernel, Index grid, int threads, size_t shared_bytes, const Args&... args) {
  const char* order = std::getenv("FURLONG_EMULATION_ORDER");
  const bool backwards = order != nullptr && order[0] == '1';
  grid_size = grid;
  block_size = {static_cast<unsigned>(threads), 1, 1};
  Block state;
  block = &state;
  state.threads.resize(threads);
  for (Thread& thread : state.threads) thread.stack.resize(1 << 17);
  state.body = [&] { kernel(args...); };
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      block_index = {x, y, 0};
      run_block(state, shared_bytes, backwards);
    }
  }
  block = nullptr;
}

}  // namespace furlong::kda::emulation

namespace furlong::kda::cuda {

namespace emu = emulation;

inline int thread_index() {
  return emu::block->running->index;
}
inline int block_index_x() {
  return static_cast<int>(emu::block_index.x);
}
inline int block_index_y() {
  return static_cast<int>(emu::block_index.y);
}
inline int grid_size_x() {
  return static_cast<int>(emu::grid_size.x);
}
inline int block_size_x() {
  return static_cast<int>(emu::block_size.x);
}
inline unsigned char* shared_memory() {
  auto address = reinterpret_cast<uintptr_t>(emu::block->shared.data());
  return reinterpret_cast<unsigned char*>((address + 1023) / 1024 * 1024);
}
inline void sync_block() {
  emu::barrier();
}
inline void sync_warp() {
  float none = 0;
  emu::exchange(&none, 1);
}
inline float shuffle_xor(float x, int mask) {
  const int lane = emu::block->running->index % 32;
  return emu::exchange(&x, 1)[lane ^ mask][0];
}
inline uint32_t shuffle_xor_word(uint32_t x, int mask) {
  float bits;
  std::memcpy(&bits, &x, 4);
  const int lane = emu::block->running->index % 32;
  std::memcpy(&x, &emu::exchange(&bits, 1)[lane ^ mask][0], 4);
  return x;
}
inline bool warp_any(bool mine) {
  float sent = mine ? 1.0f : 0.0f;
  const auto slots = emu::exchange(&sent, 1);
  bool any = false;
  for (int lane = 0; lane < 32; ++lane) any |= slots[lane][0] != 0;
  return any;
}
inline float exp2_fast(float x) {
  return std::exp2(x);
}
inline void prefetch(const void*) {}
inline float reciprocal(float x) {
  return 1.0f / x;
}
inline float rsqrt_fast(float x) {
  return 1.0f / std::sqrt(x);
}

inline constexpr float kLog2E = 1.4426950408889634f;

inline void copy_async(void* shared, const void* global, bool valid) {
  std::memset(shared, 0xff, 16);
  emu::block->running->open.push_back({shared, global, valid ? 16 : 0});
}
inline void copy_commit() {
  auto* self = emu::block->running;
  self->groups.push_back(std::move(self->open));
  self->open.clear();
}
template <int kPending>
inline void copy_wait() {
  auto* self = emu::block->running;
  while (static_cast<int>(self->groups.size()) > kPending) {
    for (const emu::Copy& copy : self->groups.front()) emu::finish(copy);
    self->groups.erase(self->groups.begin());
  }
}

/// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
template <bool kTransposed>
inline void load_matrices(uint32_t (&r)[4], const void* row) {
  float address[2];
  std::memcpy(address, &row, sizeof(row));
  const auto slots = emu::exchange(address, 2);
  const int lane = emu::block->running->index % 32;
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int i = kTransposed ? (lane % 4) * 2 + e : lane / 4, j = kTransposed ? lane / 4 : (lane % 4) * 2 + e;
      const uint16_t* source;
      std::memcpy(&source, slots[m * 8 + i], sizeof(source));
      pair[e] = source[j];
    }
    std::memcpy(&r[m], pair, 4);
  }
}

inline float bf16_bits(uint32_t word, int half) {
  const uint32_t bits = half == 0 ? word << 16 : word & 0xffff0000u;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

/// c += a b, 16 x 8 x 16.
inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  float sent[6];
  std::memcpy(sent, a, 16);
  std::memcpy(sent + 4, &b0, 4);
  std::memcpy(sent + 5, &b1, 4);
  const auto slots = emu::exchange(sent, 6);
  const int lane = emu::block->running->index % 32, group = lane / 4, quad = lane % 4;
  const auto word = [&](int from, int index) {
    uint32_t bits;
    std::memcpy(&bits, &slots[from][index], 4);
    return bits;
  };
  for (int e = 0; e < 4; ++e) {
    const int i = group + (e / 2) * 8, j = quad * 2 + e % 2;
    double sum = c[e];
    for (int k = 0; k < 16; ++k) {
      const int k8 = k % 8;
      const float x = bf16_bits(word((i % 8) * 4 + k8 / 2, (k / 8) * 2 + i / 8), k8 % 2);
      const float y = bf16_bits(word(j * 4 + k8 / 2, 4 + k / 8), k8 % 2);
      sum += static_cast<double>(x) * y;
    }
    c[e] = static_cast<float>(sum);
  }
}

}  // namespace furlong::kda::cuda
