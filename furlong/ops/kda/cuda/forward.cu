// Forward of KDA on Hopper: launches. One kernel does everything for sequences that are not split; for split ones
//   1. the kernel's map form gives every segment but the last its affine map, state -> M state + B  (segment 0: B
//   alone,
//      from the initial state),
//   2. the scan kernel turns the maps into the states entering the segments,
//   3. the kernel runs on all segments at once.
// Where the walks are fewer than the multiprocessors, all blocks prepare chunks for them (cuda/pooled.cuh). Launches:
// 1, or 3 if a sequence is split; pooled one more. Workspace: splits (segments - 1) H (K K + K V) floats, and the pool.

#include "furlong/ops/kda/cuda/pooled.cuh"
#include "furlong/ops/kda/cuda/prepare.cuh"
#include "furlong/ops/kda/cuda/token.cuh"
#include "furlong/ops/kda/cuda/walk.cuh"

namespace furlong::kda::cuda {

namespace {

template <bool kAnyGate, bool kMap>
__global__ void __launch_bounds__(OwnLayout<kAnyGate>::kThreads, 1)
    own_kernel(const __grid_constant__ KernelArgs args) {
  using Shape = OwnLayout<kAnyGate>;
  extern __shared__ __align__(1024) char shared[];
  Walk walk;
  bool active = find_walk(args, args.slices + (kMap ? 1 : 0), blockIdx.x, walk);
  const bool matrix = kMap && walk.slice == args.slices;
  if (kMap) active = active && walk.segment + 1 < walk.segments && !(matrix && walk.segment == 0);
  if (!active) {
    if (!kMap && threadIdx.x < kGroup) clear_rows(args.call, threadIdx.x);
    return;
  }
  const int rank = walk.segments > 1 ? split_rank(args, walk.sequence) : 0;
  if (threadIdx.x < kGroup) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Shape::kRecurrenceRegisters));
    run_recurrence<Shape, kMap>(args, walk, rank, matrix, shared, threadIdx.x);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Shape::kPrepareRegisters));
    Preparer<Shape, kMap> preparer(args.call.in, shared, kGroup);
    preparer.run_own(walk, matrix);
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
cudaError_t launch_own(const KernelArgs& args) {
  const auto kernel = own_kernel<kAnyGate, kMap>;
  constexpr int bytes = OwnLayout<kAnyGate>::kBytes;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int64_t blocks =
      args.call.in.sequences * args.max_segments * (args.slices + (kMap ? 1 : 0)) * args.call.in.heads;
  kernel<<<static_cast<unsigned>(blocks), OwnLayout<kAnyGate>::kThreads, bytes, args.call.stream>>>(args);
  return cudaGetLastError();
}

template <bool kAnyGate, bool kMap>
cudaError_t launch_walks(const KernelArgs& args, const PooledArgs& pooled) {
  return pooled.plan.used() ? launch_pooled<kAnyGate, kMap>(pooled) : launch_own<kAnyGate, kMap>(args);
}

template <bool kAnyGate>
cudaError_t launch_fused(const KernelArgs& args) {
  const PooledArgs pooled = pooled_args(args);
  if (pooled.plan.used()) {
    const cudaError_t error = launch_pool_tables(pooled);
    if (error != cudaSuccess) return error;
  }
  if (args.max_segments > 1) {
    const cudaError_t error = launch_walks<kAnyGate, true>(args, pooled);
    if (error != cudaSuccess) return error;
    const Inputs& in = args.call.in;
    const dim3 grid(static_cast<unsigned>(in.heads), static_cast<unsigned>(in.value_size / kScanColumns),
                    static_cast<unsigned>(in.sequences));
    scan_kernel<<<grid, kScanThreads, 0, args.call.stream>>>(args);
  }
  return launch_walks<kAnyGate, false>(args, pooled);
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
  if (!has_tensor_core_forward(args.in) || args.in.heads == 0 || args.in.value_size == 0 || args.in.sequences == 0) {
    return 0;
  }
  return maps_bytes(args) + pool_plan(args).bytes;
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
  const KernelArgs kernel_args{args, static_cast<int>(most_segments(args)),
                               static_cast<int>(args.in.value_size / kHead)};
  const bool bounded = args.in.gate_form == GateForm::kBounded && args.in.gate_NHK.type == Element::kBFloat16 &&
                       args.in.lower_bound * 16 * kLog2E > -kSafeLog2;
  return bounded ? launch_fused<false>(kernel_args) : launch_fused<true>(kernel_args);
}

}  // namespace furlong::kda::cuda
