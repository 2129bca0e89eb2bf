// Launchers of the gradient of kda_chunk. Without nvcc the same kernels run on the CPU (cuda/emulation.h), for tests.

#include <algorithm>
#include <initializer_list>

#include "furlong/ops/kda/cuda/backward_any.cuh"
#include "furlong/ops/kda/cuda/backward_finish.cuh"
#include "furlong/ops/kda/cuda/backward_prepare.cuh"
#include "furlong/ops/kda/cuda/backward_sums.cuh"
#include "furlong/ops/kda/cuda/backward_walk.cuh"

namespace furlong::kda::cuda {

namespace {

struct Grid {
  int64_t x, y = 1;
};

#if defined(__CUDACC__)
template <typename Work>
int launch(void (*kernel)(BackwardArgs, Work), Grid grid, int threads, int shared_bytes, const BackwardArgs& args,
           const Work& work) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y)), threads, shared_bytes, args.stream>>>(
      args, work);
  return cudaGetLastError();
}

int multiprocessors() {
  int device = 0, count = 132;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}
#else
template <typename Work>
int launch(void (*kernel)(BackwardArgs, Work), Grid grid, int threads, int shared_bytes, const BackwardArgs& args,
           const Work& work) {
  emulation::run(kernel, {static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), 1}, threads, shared_bytes, args,
                 work);
  return 0;
}

int multiprocessors() {
  return 3;
}
#endif

/// Hands out a workspace in pieces of 256 bytes.
class Carver {
 public:
  explicit Carver(void* memory) : memory_(static_cast<unsigned char*>(memory)) {}
  template <typename T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * sizeof(T) + 255) / 256 * 256;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  unsigned char* memory_;
  size_t used_ = 0;
};

GradientWork carve(const Inputs& in, void* early, void* kept, size_t* early_bytes, size_t* kept_bytes) {
  GradientWork work{};
  work.slots = static_cast<int>(gradient_slots(in.tokens, in.sequences));
  const int64_t tiles = work.slots * in.heads, rows = tiles * 64 * in.key_size;
  Carver first(early), second(kept);
  work.minus_w = first.take<bf16>(rows);
  work.k_end = first.take<bf16>(rows);
  work.q_start = first.take<bf16>(rows);
  work.table_X = second.take<ChunkEntry>(work.slots);
  work.values = second.take<bf16>(rows);
  work.d_values = second.take<bf16>(rows);
  work.inverse = second.take<bf16>(tiles * 64 * 64);
  work.states = second.take<bf16>(tiles * in.key_size * in.key_size);
  work.d_states = second.take<bf16>(tiles * in.key_size * in.key_size);
  work.end = second.take<float>(tiles * in.key_size);
  work.partial = second.take<float>(in.gate_form == GateForm::kGiven ? 0 : tiles * 2 * in.key_size);
  if (early_bytes != nullptr) *early_bytes = first.used();
  if (kept_bytes != nullptr) *kept_bytes = second.used();
  return work;
}

/// False only for a gate that cannot forget more than a block's factors carry.
bool needs_pairs(const Inputs& in) {
  return in.gate_form != GateForm::kBounded || in.lower_bound * -8.0f * kLog2E > kWidestHalf;
}

template <int kD, bool kPairs>
int prepare(const BackwardArgs& args, const GradientWork& work) {
  return launch(gradient_prepare<kD, kPairs>, {work.slots * args.in.heads}, 4 * kD, PrepareShared<kD, kPairs>::kBytes,
                args, work);
}

template <int kD, int kSlice, bool kReverse>
int walk_slice(const BackwardArgs& args, const GradientWork& work) {
  using Shared = WalkShared<kD, kSlice, kReverse>;
  return launch(gradient_walk<kD, kSlice, kReverse>, {kD / kSlice, args.in.sequences * args.in.heads}, Shared::kThreads,
                Shared::kBytes, args, work);
}

/// The widest slice that still gives most multiprocessors a block: tiles are then read least often. The slice does not
/// change a bit of the result.
int best_slice(const BackwardArgs& args) {
  if (args.walk_slice > 0) return args.walk_slice;
  const int64_t walks = args.in.sequences * args.in.heads, enough = multiprocessors() * 7 / 10;
  for (int64_t slice = args.in.key_size; slice > 32; slice /= 2) {
    if (walks * (args.in.key_size / slice) >= enough) return static_cast<int>(slice);
  }
  return 32;
}

template <int kD, bool kReverse>
int walk(const BackwardArgs& args, const GradientWork& work) {
  const int slice = best_slice(args);
  if constexpr (kD >= 128) {
    if (slice == 128) return walk_slice<kD, 128, kReverse>(args, work);
  }
  return slice == 64 ? walk_slice<kD, 64, kReverse>(args, work) : walk_slice<kD, 32, kReverse>(args, work);
}

template <int kD>
int walk_both(const BackwardArgs& args, const GradientWork& work) {
  int error = launch(gradient_table, {(work.slots + 127) / 128}, 128, 0, args, work);
  if (error == 0) error = needs_pairs(args.in) ? prepare<kD, true>(args, work) : prepare<kD, false>(args, work);
  if (error == 0) error = walk<kD, false>(args, work);
  if (error == 0) error = walk<kD, true>(args, work);
  return error;
}

template <int kD>
int finish(const BackwardArgs& args, const GradientWork& work) {
  const int64_t blocks = std::min<int64_t>(multiprocessors(), work.slots * args.in.heads);
  const int bytes = FinishShared<kD>::kBytes;
  int error = needs_pairs(args.in) ? launch(gradient_finish<kD, true>, {blocks}, 4 * kD, bytes, args, work)
                                   : launch(gradient_finish<kD, false>, {blocks}, 4 * kD, bytes, args, work);
  if (error == 0 && args.in.gate_form != GateForm::kGiven) {
    error = launch(gradient_gate_sums<kD>, {args.in.heads, 3}, 1024, 4096, args, work);
  }
  return error;
}

bool aligned(const Rows& x) {
  const int64_t unit = x.type == Element::kBFloat16 ? 8 : 4;
  const bool near = x.token_stride >= 0 && x.token_stride < kWidestTokenStride;
  return near && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.token_stride % unit == 0 &&
         x.head_stride % unit == 0;
}

}  // namespace

bool has_tensor_core_backward(const BackwardArgs& args) {
  const Inputs& in = args.in;
  const bool size = in.key_size == in.value_size && (in.key_size == 64 || in.key_size == 128);
  const auto bf16_rows = [](const Rows& x) { return x.type == Element::kBFloat16 && aligned(x); };
  return size && bf16_rows(in.q_NHK) && bf16_rows(in.k_NHK) && bf16_rows(in.v_NHV) && bf16_rows(args.d_out_NHV) &&
         aligned(in.gate_NHK);
}

size_t backward_early_bytes(const Inputs& in) {
  size_t bytes = 0;
  carve(in, nullptr, nullptr, &bytes, nullptr);
  return bytes;
}

size_t backward_kept_bytes(const Inputs& in) {
  size_t bytes = 0;
  carve(in, nullptr, nullptr, nullptr, &bytes);
  return bytes;
}

int launch_backward_walk(const BackwardArgs& args) {
  const GradientWork work = carve(args.in, args.early, args.kept, nullptr, nullptr);
  return args.in.key_size == 128 ? walk_both<128>(args, work) : walk_both<64>(args, work);
}

int launch_backward_finish(const BackwardArgs& args) {
  const GradientWork work = carve(args.in, nullptr, args.kept, nullptr, nullptr);
  return args.in.key_size == 128 ? finish<128>(args, work) : finish<64>(args, work);
}

size_t backward_any_bytes(const Inputs& in) {
  const int64_t square = in.key_size * in.value_size, walks = in.sequences * in.heads;
  return (gradient_slots(in.tokens, in.sequences) * in.heads + walks * (kGradientChunk + 2)) * square * sizeof(float);
}

int launch_backward_any(const BackwardArgs& args) {
  const Inputs& in = args.in;
  const int64_t square = in.key_size * in.value_size, walks = in.sequences * in.heads;
  AnyWork work{};
  work.entering = static_cast<float*>(args.kept);
  work.span = work.entering + gradient_slots(in.tokens, in.sequences) * in.heads * square;
  work.d_state = work.span + walks * (kGradientChunk + 1) * square;
  return launch(gradient_any, {walks}, kAnyThreads, sizeof(AnyShared), args, work);
}

}  // namespace furlong::kda::cuda
