#pragma once

// Arguments of the CUDA kernels: pointers and strides, no tensors.
//   N packed tokens   B sequences   S state slots   P channels   W kernel width   T = W - 1 tail columns

#include <cuda_runtime_api.h>

#include <cstdint>

namespace furlong::short_conv_detail {

constexpr int kMaxCudaWidth = 16;
// Rows of a block of the gradient: a partial weight gradient each.
constexpr int64_t kGradientBlockRows = 128;

/// x, y, tails and their gradients share one type: bf16 or fp32.
struct ConvShape {
  int64_t rows = 0, sequences = 0, channels = 0;
  int width = 0;  // 1 ... kMaxCudaWidth
  bool bf16 = false;
  const int64_t* offsets = nullptr;  // [B + 1]; rows from offsets[B] on are neither read nor counted
};

struct ConvForwardLaunch {
  ConvShape shape;
  const void* x = nullptr;  // [N, P], rows x_stride elements apart
  int64_t x_stride = 0;
  const float* weight = nullptr;       // [P, W]
  const void* initial_tail = nullptr;  // [B, T, P] or null
  void* y = nullptr;                   // [N, P]
  void* final_tail = nullptr;          // [B, T, P]
};

struct ConvBackwardLaunch {
  ConvShape shape;
  const void* x = nullptr;
  int64_t x_stride = 0;
  const void* d_y = nullptr;
  int64_t d_y_stride = 0;
  const float* weight = nullptr;
  const void* initial_tail = nullptr;
  const void* d_final_tail = nullptr;  // [B, T, P] or null
  void* d_x = nullptr;                 // [N, P]
  void* d_initial_tail = nullptr;      // [B, T, P]; rows of empty sequences are left as they are
  float* d_weight = nullptr;           // [P, W]
  float* workspace = nullptr;          // conv_backward_workspace(shape) floats
};

/// One token of each of B sequences (shape.rows); tails lie in slots of a pool that may be a view of wider rows.
struct ConvStepLaunch {
  ConvShape shape;
  const void* x = nullptr;
  int64_t x_stride = 0;
  const float* weight = nullptr;
  void* pool = nullptr;
  int64_t slots = 0, slot_stride = 0, column_stride = 0;
  const int64_t* slot = nullptr;  // [B], a slot at most once; a slot outside the pool stops the kernel with a message
  void* y = nullptr;              // [B, P]
};

/// Two launches, no workspace.
cudaError_t launch_conv_forward(const ConvForwardLaunch& in, cudaStream_t stream);
/// Floats: [row blocks, W, P].
int64_t conv_backward_workspace(const ConvShape& shape);
/// Two launches. Weight gradients are summed in a fixed order.
cudaError_t launch_conv_backward(const ConvBackwardLaunch& in, cudaStream_t stream);
/// One launch.
cudaError_t launch_conv_step(const ConvStepLaunch& in, cudaStream_t stream);

}  // namespace furlong::short_conv_detail
