#pragma once

// The forward kernel whose chunks are prepared by all blocks (cuda/pool.cuh), its tables and its place in the
// workspace.

#include <algorithm>

#include "furlong/ops/kda/cuda/pool.cuh"
#include "furlong/ops/kda/cuda/prepare.cuh"
#include "furlong/ops/kda/cuda/walk.cuh"

namespace furlong::kda::cuda {

struct PoolPlan {
  int blocks = 0;  // of the machine; 0: no pool
  int tasks = 0, walkers = 0, slots = 0;
  size_t bytes = 0;  // of workspace
  bool used() const { return blocks > 0; }
};

struct PooledArgs {
  KernelArgs base;
  PoolPlan plan;
  Pool pools[2];  // of the outputs, of the maps
};

inline constexpr int kTableThreads = 256;
inline constexpr int kMatrixSlices = kHead / PooledLayout<false>::kColumns;  // of the walks for M
inline constexpr int64_t kPooledTokens = 512;  // shorter walks end before others' chunks arrive

inline size_t aligned_bytes(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

/// Places the tables of one pool from `at` on; returns their end.
inline char* place_tables(const PoolPlan& plan, char* at, Pool& pool) {
  const auto take = [&](auto*& pointer, size_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
    at += aligned_bytes(count * sizeof(*pointer));
  };
  take(pool.header, 1);
  take(pool.spans, plan.tasks);
  take(pool.all, plan.walkers);
  pool.slots = plan.slots;
  pool.ready_step = (plan.slots + kFlagStep - 1) / kFlagStep * kFlagStep;
  take(pool.fetched, static_cast<size_t>(plan.walkers) * kFlagStep);
  take(pool.ready, static_cast<size_t>(plan.tasks) * pool.ready_step);
  pool.max_tasks = plan.tasks;
  return at;
}

/// A pool where every walk has a block.
inline PoolPlan pool_plan(const ForwardArgs& call) {
  PoolPlan plan;
  if (call.longest < kPooledTokens) return plan;
  const int64_t segments = most_segments(call), slices = call.in.value_size / PooledLayout<false>::kColumns;
  const int64_t tasks = call.in.sequences * segments * call.in.heads;
  // The first segment's map has no M.
  const int64_t maps = segments > 1 ? (segments - 1) * (slices + kMatrixSlices) - kMatrixSlices : 0;
  const int64_t walkers = std::max(tasks * slices, call.in.sequences * maps * call.in.heads);
  int device = 0, blocks = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || walkers > blocks ||
      walkers > kTableThreads) {
    return plan;
  }
  plan.blocks = blocks;
  plan.tasks = static_cast<int>(tasks);
  plan.walkers = static_cast<int>(walkers);
  // All chunks that are prepared at a time, what waits in the stages of a walk, and a few more.
  const int at_work = PooledLayout<false>::kGroups * blocks / plan.tasks + 1;
  const int64_t chunks = segment_chunks(call.longest, static_cast<int>(segments));
  plan.slots = static_cast<int>(std::min<int64_t>(at_work + 8, chunks));
  Pool pool;
  for (int i = 0; i < 2; ++i)
    plan.bytes += static_cast<size_t>(place_tables(plan, nullptr, pool) - static_cast<char*>(nullptr));
  plan.bytes += static_cast<size_t>(plan.tasks) * plan.slots * Stage::kPrepared;
  return plan;
}

inline PooledArgs pooled_args(const KernelArgs& args) {
  PooledArgs pooled{args, pool_plan(args.call), {}};
  char* at = static_cast<char*>(args.call.workspace) + maps_bytes(args.call);
  if (!pooled.plan.used()) return pooled;
  for (Pool& pool : pooled.pools) at = place_tables(pooled.plan, at, pool);
  for (Pool& pool : pooled.pools) pool.ring = at;
  return pooled;
}

/// Fills the tables of a pool: block 0 that of the outputs, block 1 that of the maps.
__global__ void __launch_bounds__(kTableThreads) table_kernel(const __grid_constant__ PooledArgs args) {
  const KernelArgs& base = args.base;
  const bool map = blockIdx.x == 1;
  const Pool& pool = args.pools[blockIdx.x];
  const int index = threadIdx.x, slices = static_cast<int>(base.call.in.value_size / PooledLayout<false>::kColumns);
  __shared__ int walkers_of[kTableThreads], least, most;
  if (index == 0) {
    least = 0x7fffffff;
    most = 0;
  }
  for (int i = index; i < args.plan.walkers * kFlagStep; i += kTableThreads) pool.fetched[i] = 0;
  for (int i = index; i < pool.max_tasks * pool.ready_step; i += kTableThreads) pool.ready[i] = 0;
  Walker walker = {};
  bool active = index < pool.max_tasks && find_walk(base, 1, index, walker.walk);
  if (map) active = active && walker.walk.segment + 1 < walker.walk.segments;
  walkers_of[index] = !active ? 0 : slices + (map && walker.walk.segment > 0 ? kMatrixSlices : 0);
  __syncthreads();
  for (int i = 0; i < index; ++i) {
    walker.walk.first_walker += walkers_of[i];
    walker.task += walkers_of[i] > 0 ? 1 : 0;
  }
  walker.walk.walkers = walkers_of[index];
  if (active) {
    atomicMin(&least, walker.walk.chunks);
    atomicMax(&most, walker.walk.chunks);
    for (int b = 0; b < walker.walk.sequence; ++b) {
      const int64_t length = base.call.in.offsets[b + 1] - base.call.in.offsets[b];
      walker.rank += split_segments(length, base.call.in.heads) > 1 ? 1 : 0;
    }
    pool.spans[walker.task] = walker.walk;
    for (int slice = 0; slice < walkers_of[index]; ++slice) {
      walker.walk.slice = slice;
      walker.matrix = slice >= slices ? 1 : 0;
      pool.all[walker.walk.first_walker + slice] = walker;
    }
  }
  __syncthreads();
  if (index == kTableThreads - 1) {
    const int walkers = walker.walk.first_walker + walkers_of[index];
    *pool.header = {walker.task + (active ? 1 : 0), walkers, least, most, 0};
  }
}

/// By one thread: the barriers of the stages. Full: the fetching threads and the bytes that one of them announces;
/// empty: the warps of the recurrence.
template <typename Shape>
__device__ void init_phases(char* shared) {
  for (int i = 0; i < Shape::kStages; ++i) {
    const uint32_t full = shared_address(shared) + Shape::kPhaseBase + i * 16;
    phase_init(full, Shape::kCarryThreads + 1);
    phase_init(full + 8, kGroup / 32);
  }
  for (int i = 0; i < Shape::kOutputs; ++i) {
    const uint32_t full = shared_address(shared) + Shape::kOutputPhaseBase + i * 16;
    phase_init(full, kGroup / 32);
    phase_init(full + 8, Shape::kCarryThreads / 32);
  }
  proxy_fence();
}

inline cudaError_t launch_pool_tables(const PooledArgs& args) {
  const int pools = args.base.max_segments > 1 ? 2 : 1;
  table_kernel<<<pools, kTableThreads, 0, args.base.call.stream>>>(args);
  return cudaGetLastError();
}

template <bool kAnyGate, bool kMap>
__global__ void __launch_bounds__(PooledLayout<kAnyGate>::kThreads, 1)
    pooled_kernel(const __grid_constant__ PooledArgs args) {
  using Shape = PooledLayout<kAnyGate>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ Walker walker;
  const Pool& pool = args.pools[kMap ? 1 : 0];
  const int walkers = pool.header->walkers, block = static_cast<int>(blockIdx.x);
  const bool walks = block < walkers;
  if (walks && threadIdx.x < sizeof(Walker) / 4) {
    reinterpret_cast<int*>(&walker)[threadIdx.x] = reinterpret_cast<const int*>(pool.all + block)[threadIdx.x];
  }
  if (walks && threadIdx.x == 0) init_phases<Shape>(shared);
  __syncthreads();
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  const ForwardArgs& call = args.base.call;
  if (walks && group == 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Shape::kRecurrenceRegisters));
    run_recurrence<Shape, kMap>(args.base, walker.walk, walker.rank, walker.matrix != 0, shared, thread);
  } else if (walks && group == Shape::kCarryGroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Shape::kCarryRegisters));
    if (thread < Shape::kCarryThreads) {
      Fetcher<Shape, kMap> fetcher{pool, walker, shared_address(shared), thread};
      fetcher.run(call.in);
    } else if (!kMap) {
      store_outputs<Shape>(walker.walk, shared, output_of<Shape>(call, walker.walk),
                           call.in.heads * call.in.value_size * 2, thread - Shape::kCarryThreads);
    }
  } else if (walks && group == Shape::kRestGroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Shape::kRestRegisters));
  } else {
    const int first_group = walks ? Shape::kFirstPrepareGroup : 0;
    Preparer<Shape, kMap> preparer(call.in, walks ? shared + Shape::kWalkerGroupBase : shared, first_group * kGroup);
    preparer.run_pooled(pool);
    if (!kMap && !walks && group == 0) clear_rows(call, thread);
  }
}

template <bool kAnyGate, bool kMap>
cudaError_t launch_pooled(const PooledArgs& args) {
  const auto kernel = pooled_kernel<kAnyGate, kMap>;
  constexpr int bytes = PooledLayout<kAnyGate>::kBytes;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  void* parameters[] = {const_cast<PooledArgs*>(&args)};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(args.plan.blocks),
                                     dim3(PooledLayout<kAnyGate>::kThreads), parameters, bytes, args.base.call.stream);
}

}  // namespace furlong::kda::cuda
