#pragma once

// Plain arguments of the CUDA gradient of kda_chunk: raw pointers, strides, a stream.
//   N packed tokens   B sequences   H heads   K key size   V value size   X slots of 64-row chunks

#include "furlong/ops/kda/cuda/args.h"

namespace furlong::kda::cuda {

/// Token strides below this many elements: offsets inside a chunk are 32-bit. Wider views are the caller's to copy.
inline constexpr int64_t kWidestTokenStride = int64_t{1} << 24;

/// Rows of a chunk of the gradient; counted from a sequence's first token.
inline constexpr int kGradientChunk = 64;

/// Chunk slots that any split of `tokens` into `sequences` fits in; see slot_of in cuda/backward_chunk.cuh.
constexpr int64_t gradient_slots(int64_t tokens, int64_t sequences) {
  return tokens / kGradientChunk + sequences;
}

/// Gradient of everything that ForwardArgs::in holds, and of the initial state. Outputs are contiguous and written
/// whole for the rows of the sequences; rows past the last sequence are the caller's to clear.
struct BackwardArgs {
  Inputs in;
  Rows d_out_NHV;                             // element type of v
  const float* initial_state_BHKV = nullptr;  // null: zero
  const float* d_final_state_BHKV = nullptr;  // null: zero
  void* d_q_NHK = nullptr;                    // element type of q
  void* d_k_NHK = nullptr;                    //
  void* d_v_NHV = nullptr;                    //
  void* d_gate_NHK = nullptr;                 // element type of the gate
  void* d_beta_NH = nullptr;                  // element type of beta
  float* d_initial_state_BHKV = nullptr;      // null: not wanted
  float* d_a_log_H = nullptr;                 // with kBounded and kSoftplus
  float* d_dt_bias_HK = nullptr;              //
  // Two workspaces: `early` is free again once launch_backward_walk returns (stream order), so that the gradients may
  // be allocated in its place; `kept` is needed until launch_backward_finish.
  void* early = nullptr;
  void* kept = nullptr;
  int walk_slice = 0;  // value columns a block of the walks holds: 32, 64, 128; 0: by the multiprocessors
  Stream stream = nullptr;
};

/// True if the tensor-core kernels take these inputs (bf16, K = V = 64 or 128, 16-byte aligned rows). Everything else
/// goes through launch_backward_any.
bool has_tensor_core_backward(const BackwardArgs& args);

size_t backward_early_bytes(const Inputs& in);
size_t backward_kept_bytes(const Inputs& in);

/// Recomputes what the chunks share and walks both recurrences: 3 launches and one for the chunk table.
int launch_backward_walk(const BackwardArgs& args);
/// The gradients, all chunks at once: 1 launch, 2 with a fused gate.
int launch_backward_finish(const BackwardArgs& args);

/// Token by token in fp32 for any size up to 256, given gates and betas (no fused form). One launch.
size_t backward_any_bytes(const Inputs& in);
int launch_backward_any(const BackwardArgs& args);

}  // namespace furlong::kda::cuda
