// Forward of KDA on Hopper: launches. One kernel does everything for sequences that are not split; for split ones
//   1. the map kernel gives every segment but the last its affine map, state -> M state + B  (segment 0: B alone, from
//      the initial state),
//   2. the scan kernel turns the maps into the states entering the segments,
//   3. the forward kernel runs on all segments at once.
// Launches: 1, or 3 if a sequence is split. Workspace: splits (segments - 1) H (K K + K V) floats, else none.

#include <algorithm>

#include "furlong/ops/kda/cuda/prepare.cuh"
#include "furlong/ops/kda/cuda/recurrence.cuh"
#include "furlong/ops/kda/cuda/token.cuh"

namespace furlong::kda::cuda {

namespace {

struct KernelArgs {
  ForwardArgs call;
  int max_segments;  // of the longest sequence
  int slices;        // blocks of 128 value columns; the map kernel has kHead / 128 = 1 more for M
};

/// Number of split sequences before sequence `b`: its row in the workspace. Called by the whole block.
__device__ int split_rank(const KernelArgs& args, int b) {
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

__device__ float* workspace_map(const KernelArgs& args, int rank, int segment, int head, int64_t element) {
  const Inputs& in = args.call.in;
  const int64_t per_head = kHead * (kHead + in.value_size);
  const int64_t row = (static_cast<int64_t>(rank) * (args.max_segments - 1) + segment) * in.heads + head;
  return static_cast<float*>(args.call.workspace) + row * per_head + element;
}
/// M [K, K] of a segment.
__device__ float* map_matrix(const KernelArgs& args, int rank, int segment, int head) {
  return workspace_map(args, rank, segment, head, 0);
}
/// B [K, V] of a segment; after the scan the state entering the next one.
__device__ float* map_offset(const KernelArgs& args, int rank, int segment, int head) {
  return workspace_map(args, rank, segment, head, kHead * kHead);
}

/// Which chunks block `blockIdx.x` walks; false if none.
__device__ bool find_walk(const KernelArgs& args, int slices, Walk& walk) {
  int64_t index = blockIdx.x;
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

__device__ const float* initial_state(const ForwardArgs& call, const Walk& walk) {
  if (call.initial_state_SHKV == nullptr) return nullptr;
  const int64_t row = call.initial_slots_B != nullptr ? call.initial_slots_B[walk.sequence] : walk.sequence;
  return call.initial_state_SHKV + (row * call.in.heads + walk.head) * kHead * call.in.value_size + walk.slice * kHead;
}

/// Rows past the last sequence, by all blocks together.
__device__ void clear_rows(const ForwardArgs& call, int thread) {
  const int64_t row_words = call.in.heads * call.in.value_size / 8;
  uint4* out = static_cast<uint4*>(call.out_NHV);
  for (int64_t row = call.in.offsets[call.in.sequences] + blockIdx.x; row < call.in.tokens; row += gridDim.x) {
    for (int64_t i = thread; i < row_words; i += kGroup) out[row * row_words + i] = make_uint4(0, 0, 0, 0);
  }
}

template <bool kAnyGate, bool kMap>
__device__ void run_recurrence(const KernelArgs& args, const Walk& walk, int rank, bool matrix, char* shared,
                               int thread) {
  const ForwardArgs& call = args.call;
  const int64_t values = call.in.value_size, state_size = kHead * values;
  Recurrence<kAnyGate, kMap> recurrence(walk, shared, thread);
  const float* entering = walk.segment == 0 ? initial_state(call, walk) : nullptr;
  if (!kMap && walk.segment > 0) {
    entering = map_offset(args, rank, walk.segment - 1, walk.head) + walk.slice * kHead;
  }
  if (matrix) {
    recurrence.set_identity();
  } else if (entering != nullptr) {
    recurrence.load_state(entering, values);
  } else {
    recurrence.clear();
  }
  const int64_t out_row = call.in.heads * values * 2;
  char* out =
      static_cast<char*>(call.out_NHV) + walk.first_token * out_row + (walk.head * values + walk.slice * kHead) * 2;
  const int64_t start = call.in.offsets[walk.sequence];
  const int first_chunk = static_cast<int>((walk.first_token - start) / kChunk);
  recurrence.run(out, out_row, [&](int chunk) {
    if (kMap || call.saved_state_XHKV == nullptr || (first_chunk + chunk) % call.saved_every != 0) return;
    const int64_t row = saved_row(start, walk.sequence, first_chunk + chunk, call.saved_every);
    recurrence.store_state(call.saved_state_XHKV + (row * call.in.heads + walk.head) * state_size + walk.slice * kHead,
                           values);
  });
  if (kMap) {
    if (matrix) {
      recurrence.store_state(map_matrix(args, rank, walk.segment, walk.head), kHead);
    } else {
      recurrence.store_state(map_offset(args, rank, walk.segment, walk.head) + walk.slice * kHead, values);
    }
  } else {
    if (walk.segment + 1 == walk.segments && call.final_state_SHKV != nullptr) {
      const int64_t row = call.final_slots_B != nullptr ? call.final_slots_B[walk.sequence] : walk.sequence;
      recurrence.store_state(
          call.final_state_SHKV + (row * call.in.heads + walk.head) * state_size + walk.slice * kHead, values);
    }
    clear_rows(call, thread);
  }
}

template <bool kAnyGate, bool kMap>
__global__ void __launch_bounds__(Layout<kAnyGate>::kThreads, 1)
    forward_kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(1024) char shared[];
  Walk walk;
  const int slices = args.slices + (kMap ? 1 : 0);
  bool active = find_walk(args, slices, walk);
  const bool matrix = kMap && walk.slice == args.slices;
  if (kMap) active = active && walk.segment + 1 < walk.segments && !(matrix && walk.segment == 0);
  if (!active) {
    if (!kMap && threadIdx.x < kGroup) clear_rows(args.call, threadIdx.x);
    return;
  }
  const int rank = walk.segments > 1 ? split_rank(args, walk.sequence) : 0;
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  if (group == 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Layout<kAnyGate>::kRecurrenceRegisters));
    run_recurrence<kAnyGate, kMap>(args, walk, rank, matrix, shared, thread);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Layout<kAnyGate>::kPrepareRegisters));
    Preparer<kAnyGate, kMap> preparer(args.call.in, walk, shared);
    preparer.run(matrix);
  }
}

constexpr int kScanColumns = 16;
constexpr int kScanThreads = 256;

/// states[s + 1] = M_s states[s] + B_s, in fp32; block = 16 value columns of a head of a split sequence.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(const __grid_constant__ KernelArgs args) {
  __shared__ float state[kHead][kScanColumns];
  const int head = blockIdx.x, sequence = blockIdx.z, column = blockIdx.y * kScanColumns;
  const int64_t length = args.call.in.offsets[sequence + 1] - args.call.in.offsets[sequence];
  const int segments = static_cast<int>(split_segments(length, args.call.in.heads));
  if (segments == 1) return;
  const int rank = split_rank(args, sequence);
  const int row = threadIdx.x / 2, first = threadIdx.x % 2 * 8;
  const int64_t at = row * args.call.in.value_size + column + first;
  float sum[8];
  for (int i = 0; i < 8; ++i) sum[i] = map_offset(args, rank, 0, head)[at + i];
  for (int segment = 1; segment + 1 < segments; ++segment) {
    for (int i = 0; i < 8; ++i) state[row][first + i] = sum[i];
    __syncthreads();
    const float4* matrix = reinterpret_cast<const float4*>(map_matrix(args, rank, segment, head) + row * kHead);
    float* offset = map_offset(args, rank, segment, head) + at;
    for (int i = 0; i < 8; ++i) sum[i] = offset[i];
    for (int k = 0; k < kHead; k += 4) {
      const float4 m = matrix[k / 4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[i] = fmaf(m.x, state[k][first + i], sum[i]);
        sum[i] = fmaf(m.y, state[k + 1][first + i], sum[i]);
        sum[i] = fmaf(m.z, state[k + 2][first + i], sum[i]);
        sum[i] = fmaf(m.w, state[k + 3][first + i], sum[i]);
      }
    }
    for (int i = 0; i < 8; ++i) offset[i] = sum[i];
    __syncthreads();
  }
}

template <bool kAnyGate, bool kMap>
cudaError_t launch_walk(const KernelArgs& args) {
  const auto kernel = forward_kernel<kAnyGate, kMap>;
  constexpr int bytes = Layout<kAnyGate>::kBytes;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int64_t blocks =
      args.call.in.sequences * args.max_segments * (args.slices + (kMap ? 1 : 0)) * args.call.in.heads;
  kernel<<<static_cast<unsigned>(blocks), Layout<kAnyGate>::kThreads, bytes, args.call.stream>>>(args);
  return cudaGetLastError();
}

template <bool kAnyGate>
cudaError_t launch_fused(const KernelArgs& args) {
  if (args.max_segments > 1) {
    const cudaError_t error = launch_walk<kAnyGate, true>(args);
    if (error != cudaSuccess) return error;
    const Inputs& in = args.call.in;
    const dim3 grid(static_cast<unsigned>(in.heads), static_cast<unsigned>(in.value_size / kScanColumns),
                    static_cast<unsigned>(in.sequences));
    scan_kernel<<<grid, kScanThreads, 0, args.call.stream>>>(args);
  }
  return launch_walk<kAnyGate, false>(args);
}

bool aligned(const Rows& rows) {
  const int64_t per_piece = rows.type == Element::kFloat ? 4 : 8;
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.token_stride % per_piece == 0 &&
         rows.head_stride % per_piece == 0;
}

}  // namespace

bool has_tensor_core_forward(const Inputs& in) {
  return in.key_size == kHead && in.value_size % kHead == 0 && in.q_NHK.type == Element::kBFloat16 &&
         in.k_NHK.type == Element::kBFloat16 && in.v_NHV.type == Element::kBFloat16 && aligned(in.q_NHK) &&
         aligned(in.k_NHK) && aligned(in.v_NHV) && aligned(in.gate_NHK);
}

size_t forward_workspace_bytes(const ForwardArgs& args) {
  if (!has_tensor_core_forward(args.in) || args.splits == 0) return 0;
  return static_cast<size_t>(args.splits * (split_segments(args.longest, args.in.heads) - 1) * args.in.heads * kHead *
                             (kHead + args.in.value_size)) *
         sizeof(float);
}

int launch_forward(const ForwardArgs& args) {
  if (args.in.heads == 0 || args.in.value_size == 0) return cudaSuccess;
  if (args.in.sequences == 0) {  // nothing but rows past the end
    const size_t width = args.in.v_NHV.type == Element::kFloat ? 4 : 2;
    const size_t bytes = static_cast<size_t>(args.in.tokens * args.in.heads * args.in.value_size) * width;
    return cudaMemsetAsync(args.out_NHV, 0, bytes, args.stream);
  }
  if (!has_tensor_core_forward(args.in)) return launch_token_forward(args);
  if (args.workspace_bytes < forward_workspace_bytes(args)) return cudaErrorInvalidValue;
  const KernelArgs kernel_args{args,
                               static_cast<int>(args.splits > 0 ? split_segments(args.longest, args.in.heads) : 1),
                               static_cast<int>(args.in.value_size / kHead)};
  const bool bounded = args.in.gate_form == GateForm::kBounded && args.in.gate_NHK.type == Element::kBFloat16 &&
                       args.in.lower_bound * 16 * kLog2E > -kSafeLog2;
  return bounded ? launch_fused<false>(kernel_args) : launch_fused<true>(kernel_args);
}

}  // namespace furlong::kda::cuda
