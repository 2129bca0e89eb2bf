#pragma once

// What the forward kernels share: which chunks a block walks, where states and maps lie, a walk from state to state.

#include "furlong/ops/kda/cuda/layout.cuh"
#include "furlong/ops/kda/cuda/recurrence.cuh"

namespace furlong::kda::cuda {

struct KernelArgs {
  ForwardArgs call;
  int max_segments;  // of the longest sequence
  int slices;        // of 128 value columns; a map has one more for M
};

/// Segments of the longest sequence.
inline int64_t most_segments(const ForwardArgs& call) {
  return call.splits > 0 ? split_segments(call.longest, call.in.heads) : 1;
}
/// Workspace for M and B of all segments but the last ones.
inline size_t maps_bytes(const ForwardArgs& call) {
  return static_cast<size_t>(call.splits * (most_segments(call) - 1) * call.in.heads * kHead *
                             (kHead + call.in.value_size)) *
         sizeof(float);
}

/// Number of split sequences before sequence `b`: its row in the workspace. Called by the whole block.
__device__ inline int split_rank(const KernelArgs& args, int b) {
  int mine = 0;
  for (int i = threadIdx.x; i < b; i += blockDim.x) {
    mine += split_segments(args.call.in.offsets[i + 1] - args.call.in.offsets[i], args.call.in.heads) > 1 ? 1 : 0;
  }
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  if (mine != 0) atomicAdd(&total, mine);
  __syncthreads();
  return total;
}

__device__ inline float* workspace_map(const KernelArgs& args, int rank, int segment, int head, int64_t element) {
  const Inputs& in = args.call.in;
  const int64_t per_head = kHead * (kHead + in.value_size);
  const int64_t row = (static_cast<int64_t>(rank) * (args.max_segments - 1) + segment) * in.heads + head;
  return static_cast<float*>(args.call.workspace) + row * per_head + element;
}
/// M [K, K] of a segment.
__device__ inline float* map_matrix(const KernelArgs& args, int rank, int segment, int head) {
  return workspace_map(args, rank, segment, head, 0);
}
/// B [K, V] of a segment; after the scan the state entering the next one.
__device__ inline float* map_offset(const KernelArgs& args, int rank, int segment, int head) {
  return workspace_map(args, rank, segment, head, kHead * kHead);
}

/// Walk `index` of those counted by head, slice, segment, sequence; false if there is none.
__device__ inline bool find_walk(const KernelArgs& args, int slices, int64_t index, Walk& walk) {
  walk.head = static_cast<int>(index % args.call.in.heads);
  index /= args.call.in.heads;
  walk.slice = static_cast<int>(index % slices);
  index /= slices;
  walk.segment = static_cast<int>(index % args.max_segments);
  walk.sequence = static_cast<int>(index / args.max_segments);
  const int64_t start = args.call.in.offsets[walk.sequence];
  const int64_t length = args.call.in.offsets[walk.sequence + 1] - start;
  walk.segments = static_cast<int>(split_segments(length, args.call.in.heads));
  if (walk.segment >= walk.segments) return false;
  const int64_t per_segment = static_cast<int64_t>(segment_chunks(length, walk.segments)) * kChunk;
  const int64_t first = min(length, walk.segment * per_segment);
  walk.first_token = start + first;
  walk.tokens = static_cast<int>(min(length - first, per_segment));
  walk.chunks = (walk.tokens + kChunk - 1) / kChunk;
  return true;
}

__device__ inline const float* initial_state(const ForwardArgs& call, const Walk& walk) {
  if (call.initial_state_SHKV == nullptr) return nullptr;
  const int64_t row = call.initial_slots_B != nullptr ? call.initial_slots_B[walk.sequence] : walk.sequence;
  return call.initial_state_SHKV + (row * call.in.heads + walk.head) * kHead * call.in.value_size;
}

/// The output row of a walk's first token at its first column.
template <typename Shape>
__device__ char* output_of(const ForwardArgs& call, const Walk& walk) {
  const int64_t columns = call.in.heads * call.in.value_size;
  return static_cast<char*>(call.out_NHV) +
         (walk.first_token * columns + walk.head * call.in.value_size + walk.slice * Shape::kColumns) * 2;
}

/// Rows past the last sequence, by all blocks together.
__device__ inline void clear_rows(const ForwardArgs& call, int thread) {
  const int64_t row_words = call.in.heads * call.in.value_size / 8;
  uint4* out = static_cast<uint4*>(call.out_NHV);
  for (int64_t row = call.in.offsets[call.in.sequences] + blockIdx.x; row < call.in.tokens; row += gridDim.x) {
    for (int64_t i = thread; i < row_words; i += kGroup) out[row * row_words + i] = make_uint4(0, 0, 0, 0);
  }
}

template <typename Shape, bool kMap>
__device__ void run_recurrence(const KernelArgs& args, const Walk& walk, int rank, bool matrix, char* shared,
                               int thread) {
  const ForwardArgs& call = args.call;
  const int64_t values = call.in.value_size, state_size = kHead * values;
  Recurrence<Shape, kMap> recurrence(walk, shared, thread);
  const float* entering = walk.segment == 0 ? initial_state(call, walk) : nullptr;
  if (!kMap && walk.segment > 0) entering = map_offset(args, rank, walk.segment - 1, walk.head);
  const int64_t column = walk.slice * Shape::kColumns;  // of v, in a walk for M past its last
  if (matrix) {
    recurrence.set_identity(static_cast<int>(column - values));
  } else if (entering != nullptr) {
    recurrence.load_state(entering + column, values);
  } else {
    recurrence.clear();
  }
  const int64_t out_row = call.in.heads * values * 2;
  char* out = output_of<Shape>(call, walk);
  const int64_t start = call.in.offsets[walk.sequence];
  const int first_chunk = static_cast<int>((walk.first_token - start) / kChunk);
  recurrence.run(out, out_row, [&](int chunk) {
    if (kMap || call.saved_state_XHKV == nullptr || (first_chunk + chunk) % call.saved_every != 0) return;
    const int64_t row = saved_row(start, walk.sequence, first_chunk + chunk, call.saved_every);
    recurrence.store_state(call.saved_state_XHKV + (row * call.in.heads + walk.head) * state_size + column, values);
  });
  if (kMap) {
    if (matrix) {
      recurrence.store_state(map_matrix(args, rank, walk.segment, walk.head) + column - values, kHead);
    } else {
      recurrence.store_state(map_offset(args, rank, walk.segment, walk.head) + column, values);
    }
  } else {
    if (walk.segment + 1 == walk.segments && call.final_state_SHKV != nullptr) {
      const int64_t row = call.final_slots_B != nullptr ? call.final_slots_B[walk.sequence] : walk.sequence;
      recurrence.store_state(call.final_state_SHKV + (row * call.in.heads + walk.head) * state_size + column, values);
    }
    if (thread < kGroup) clear_rows(call, thread);
  }
}

}  // namespace furlong::kda::cuda
