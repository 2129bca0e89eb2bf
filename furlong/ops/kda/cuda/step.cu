// kda_step_ on CUDA: choice of the block's shape.
//   B sequences   H heads   K key size   V value size

#include "furlong/ops/kda/cuda/step_kernel.cuh"

namespace furlong::kda::cuda {

namespace {

template <class Shape>
int launch(const StepArgs& args) {
  const int64_t strips = (args.in.value_size + Shape::kStrip - 1) / Shape::kStrip;
  const int64_t blocks = args.in.sequences * args.in.heads * strips;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  step_kernel<Shape><<<static_cast<unsigned>(blocks), Shape::kThreads, 0, args.stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

int launch_step(const StepArgs& args) {
  const Inputs& in = args.in;
  if (in.sequences == 0 || in.heads == 0 || in.value_size == 0) return cudaSuccess;
  if (in.key_size < 1 || in.key_size > kStepMaxKeys) return cudaErrorInvalidValue;
  const bool aligned = reinterpret_cast<uintptr_t>(args.state_SHKV) % 16 == 0 && in.value_size % 64 == 0;
  if (aligned && in.key_size == 128) return launch<StepShape<128, 64, 16, true, 512>>(args);
  if (aligned && in.key_size == 64) return launch<StepShape<128, 64, 8, true, 768>>(args);
  if (in.key_size <= 128) return launch<StepShape<128, 32, 8, false, 512>>(args);
  return launch<StepShape<256, 32, 8, false, 512>>(args);
}

}  // namespace furlong::kda::cuda
