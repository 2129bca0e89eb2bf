#pragma once

// Plain arguments of the CUDA launchers: raw pointers, strides, a stream. No torch, no kernels.
//   N packed tokens   B sequences   S state slots   H heads   K key size   V value size   C rows of a chunk
//
// Agreed between forward, backward and step:
//   * Strides count elements and are 64 bit. The last dimension of q, k, v, gate and out is contiguous.
//   * Chunks have kChunk rows and are counted from a sequence's first token. A tail chunk is padded with rows of
//     q = k = v = 0, decay_log = 0, beta = 0: they change neither state nor output.
//   * Rows past the last sequence are not read; launchers set their outputs to zero.
//   * Offsets live on the device. Launchers never synchronise and allocate nothing: the caller gives the workspace.
//   * A launcher returns the first cudaError_t that it met.

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define FURLONG_HOST_DEVICE __host__ __device__
#else
#define FURLONG_HOST_DEVICE
#endif

struct CUstream_st;

namespace furlong::kda::cuda {

using Stream = CUstream_st*;  // cudaStream_t

inline constexpr int kChunk = 32;

enum class Element : int { kFloat, kBFloat16 };

/// What `gate` holds.
///   kGiven     decay_log <= 0 itself, fp32
///   kBounded   z;  decay_log = lower_bound sigmoid(exp(a_log) (z + dt_bias))
///   kSoftplus  z;  decay_log = -exp(a_log) softplus(z + dt_bias), softplus linear above 20
enum class GateForm : int { kGiven, kBounded, kSoftplus };

/// A tensor [N, H, last] whose last dimension is contiguous.
struct Rows {
  const void* data = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  Element type = Element::kFloat;
};

/// What forward and backward read. With `l2_norm`, q and k are raw and the kernel uses x / sqrt(sum x^2 + l2_eps).
struct Inputs {
  Rows q_NHK, k_NHK, v_NHV;  // one element type
  Rows gate_NHK;             // fp32 if given, else fp32 or bf16
  Rows beta_NH;              // fp32; a logit may be bf16
  GateForm gate_form = GateForm::kGiven;
  bool beta_is_logit = false;  // beta = sigmoid(logit)
  bool l2_norm = false;
  float l2_eps = 1e-6f;
  float lower_bound = -5.0f;          // kBounded
  const float* a_log_H = nullptr;     // kBounded, kSoftplus
  const float* dt_bias_HK = nullptr;  // the same, contiguous
  float scale = 1.0f;
  const int64_t* offsets = nullptr;  // [B + 1] on the device
  int64_t tokens = 0;                // N; rows past offsets[B] allowed
  int64_t sequences = 0;
  int64_t heads = 0;
  int64_t key_size = 0;
  int64_t value_size = 0;
};

/// kda_chunk, fused or not. Row b of a state is slot slots[b] of a pool if slots are given.
struct ForwardArgs {
  Inputs in;
  void* out_NHV = nullptr;                    // contiguous, element type of v
  const float* initial_state_SHKV = nullptr;  // null: zero
  const int64_t* initial_slots_B = nullptr;   // null: row b
  float* final_state_SHKV = nullptr;          // null: not wanted
  const int64_t* final_slots_B = nullptr;
  // Optional, for the backward: the state entering chunks 0, saved_every, 2 saved_every, ... of each sequence, fp32
  // [rows, H, K, V], in the row that saved_row says; saved_rows_bound rows suffice.
  float* saved_state_XHKV = nullptr;
  int64_t saved_every = 0;  // in chunks
  int64_t longest = 0;      // longest sequence in tokens, known on the host: decides whether any may be split
  int64_t splits = 0;       // number of sequences that split_segments cuts: sizes the workspace
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  Stream stream = nullptr;
};

/// Row of the state entering chunk `chunk` (a multiple of `every`) of the sequence `b` that starts at token `start`.
/// Distinct for distinct pairs without a table.
FURLONG_HOST_DEVICE constexpr int64_t saved_row(int64_t start, int64_t b, int64_t chunk, int64_t every) {
  return start / (every * kChunk) + b + chunk / every;
}
constexpr int64_t saved_rows_bound(int64_t tokens, int64_t sequences, int64_t every) {
  return tokens / (every * kChunk) + sequences;
}

/// How many segments a sequence of `tokens` tokens is cut into, so that few heads still use the whole machine. Depends
/// on nothing but its length and the heads: batch neighbours do not change a result's bits. A walk is a chain of some
/// 0.8 us a chunk and 132 multiprocessors prepare some 40 chunks a us, so few heads would leave most of them idle. A
/// split prepares most chunks twice and walks twice: two segments never pay, and many leave fewer blocks that only
/// prepare.
FURLONG_HOST_DEVICE constexpr int64_t split_segments(int64_t tokens, int64_t heads) {
  if (tokens < 4096 || heads > 12) return 1;
  if (heads > 8) return 3;
  return heads > 4 ? 5 : 16;
}

/// True if the tensor-core kernel takes these inputs (bf16, K = 128, V a multiple of 128, aligned); otherwise
/// launch_forward runs the token-by-token kernel (any size up to 256, fp32 arithmetic).
bool has_tensor_core_forward(const Inputs& in);

size_t forward_workspace_bytes(const ForwardArgs& args);
int launch_forward(const ForwardArgs& args);

/// kda_step_: one token of each of in.sequences sequences (in.tokens and in.offsets are not used). Slot slots_B[b] of
/// the pool is updated in place; a slot appears once, one outside the pool stops the kernel with a message.
struct StepArgs {
  Inputs in;  // key_size at most 256
  float* state_SHKV = nullptr;
  int64_t slots = 0;  // S
  const int64_t* slots_B = nullptr;
  void* out_BHV = nullptr;  // contiguous, element type of v
  Stream stream = nullptr;
};

/// One launch, no workspace; every state is read and written once. A sequence's bits do not depend on the others.
int launch_step(const StepArgs& args);

}  // namespace furlong::kda::cuda
