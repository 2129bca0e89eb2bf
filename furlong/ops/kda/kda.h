#pragma once

// Kimi delta attention (KDA): linear attention with a per-channel decay and a delta-rule write.
//
//   N packed tokens   B sequences   S state slots   H heads   K key size   V value size
//
// For every head, with fp32 state S [K, V] (zero, or the initial state, at a sequence's first token):
//
//   S   <- diag(exp(decay_log)) S            forget first ...
//   S   <- S + beta k (v - S^T k)^T          ... then correct what S now recalls for k
//   out  = scale S^T q                       read after the write
//
// Domain: q and k arrive L2-normalised; decay_log <= 0, natural logarithm; beta in [0, 1].
// dtypes: q, k, v fp32 or bf16 (fp64 in the reference); decay_log, beta and states fp32 (fp64 with fp64 inputs).
// out has v's dtype. Rows past the last sequence: out and gradients are zero.
// Maths, kernel plan and sources: README.md in this folder.

#include <ATen/core/Tensor.h>

#include <optional>

#include "furlong/ops/common/sequence_layout.h"

namespace furlong {

struct KdaOutput {
  at::Tensor out_NHV;
  at::Tensor final_state_BHKV;  // fp32, contiguous
};

/// Chunk form over packed sequences; differentiable in q, k, v, decay_log, beta and the initial state.
/// Schema furlong::kda_chunk.
KdaOutput kda_chunk(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                    const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH, const SequenceLayout& layout,
                    const std::optional<at::Tensor>& initial_state_BHKV, double scale);

/// kda_chunk on raw projections: q and k are L2-normalised (eps 1e-6 on the sum of squares), beta is
/// sigmoid(beta_logit), decay_log is the bounded gate of z, or with lower_bound 0 the unbounded one (see below). z and
/// beta_logit are fp32 or bf16. Fused into the kernels on CUDA. Differentiable in every tensor. Schema
/// furlong::kda_chunk_fused.
KdaOutput kda_chunk_fused(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                          const at::Tensor& z_NHK, const at::Tensor& beta_logit_NH, const at::Tensor& a_log_H,
                          const at::Tensor& dt_bias_HK, const SequenceLayout& layout,
                          const std::optional<at::Tensor>& initial_state_BHKV, double lower_bound, double scale);

/// What a sequence's tokens do to the state that enters it: S_end = matrix S + offset. Maps of consecutive segments
/// compose, so that segments can be worked on at once and a scan yields every segment's entering state (context
/// parallelism).
struct KdaSegmentMap {
  at::Tensor matrix_BHKK;
  at::Tensor offset_BHKV;
};

/// The map of each of B sequences, as accurate as kda_chunk and differentiable in every tensor. Schema
/// furlong::kda_segment_map.
KdaSegmentMap kda_segment_map(const at::Tensor& k_NHK, const at::Tensor& v_NHV, const at::Tensor& decay_log_NHK,
                              const at::Tensor& beta_NH, const SequenceLayout& layout);

/// The recurrence above token by token in plain tensor operations: the oracle. Any device, fp32 or fp64; autograd
/// differentiates it. Schema furlong::kda_reference.
KdaOutput kda_reference(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                        const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH, const SequenceLayout& layout,
                        const std::optional<at::Tensor>& initial_state_BHKV, double scale);

/// One token for each of B sequences; slot slots[b] of the pool is updated in place. Refused under autograd.
/// Schema furlong::kda_step_.
at::Tensor kda_step_(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                     const at::Tensor& decay_log_BHK, const at::Tensor& beta_BH, at::Tensor& state_SHKV,
                     const at::Tensor& slots_B, double scale);

/// kda_step_ on raw projections: q and k are L2-normalised (eps 1e-6 on the sum of squares), beta is
/// sigmoid(beta_logit), decay_log is the bounded gate of z, or with lower_bound 0 the unbounded one. z and beta_logit
/// are fp32 or bf16. One kernel on CUDA. Schema furlong::kda_step_fused_.
at::Tensor kda_step_fused_(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                           const at::Tensor& z_BHK, const at::Tensor& beta_logit_BH, const at::Tensor& a_log_H,
                           const at::Tensor& dt_bias_HK, at::Tensor& state_SHKV, const at::Tensor& slots_B,
                           double lower_bound, double scale);

/// Bounded gate (Kimi K3): decay_log = lower_bound * sigmoid(exp(a_log_H) * (z + dt_bias)), in (lower_bound, 0), fp32.
/// z is fp32 or bf16. Differentiable in z, a_log, dt_bias. Schema furlong::kda_gate_bounded.
at::Tensor kda_gate_bounded(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK,
                            double lower_bound);

/// Unbounded gate (Kimi-Linear): decay_log = -exp(a_log_H) * softplus(z + dt_bias), fp32; softplus is linear above 20.
/// Schema furlong::kda_gate_softplus.
at::Tensor kda_gate_softplus(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK);

}  // namespace furlong
