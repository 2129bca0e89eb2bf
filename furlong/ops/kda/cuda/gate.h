#pragma once

// Arguments of the CUDA gate kernels: contiguous rows of H K columns.
//   N packed tokens   H heads   K key size

#include "furlong/ops/kda/cuda/args.h"

namespace furlong::kda::cuda {

struct GateArgs {
  int64_t rows = 0;  // N
  int64_t heads = 0;
  int64_t key_size = 0;
  Element type = Element::kFloat;  // of z and d_z
  const void* z = nullptr;         // [N, H, K]
  const float* a_log_H = nullptr;
  const float* dt_bias_HK = nullptr;
  GateForm form = GateForm::kBounded;  // not kGiven
  float lower_bound = -5.0f;           // kBounded
  Stream stream = nullptr;
};

struct GateGradients {
  const float* d_decay_log = nullptr;  // [N, H, K]
  void* d_z = nullptr;
  float* d_a_log_H = nullptr;
  float* d_dt_bias_HK = nullptr;
  float* workspace = nullptr;  // gate_backward_workspace(args) floats
};

/// One launch. Returns a cudaError_t, as all launchers.
int launch_gate(const GateArgs& args, float* decay_log_NHK);

/// Floats: [row blocks, 2, H K].
int64_t gate_backward_workspace(const GateArgs& args);
/// Two launches. Sums over rows have a fixed order.
int launch_gate_backward(const GateArgs& args, const GateGradients& out);

}  // namespace furlong::kda::cuda
