#pragma once

// Shared by the files of this folder: argument checks and the tensor-operation forms that back every device.
//   N packed tokens   B sequences   S state slots   H heads   K key size   V value size

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace furlong::kda {

constexpr int64_t kKeptChunkRows = 32;  // tokens of a chunk whose entering state and corrections are kept

/// Shapes, dtypes and offsets of kda_chunk and kda_reference.
void check_arguments(const char* op, const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                     const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH, const at::Tensor& offsets,
                     const at::Tensor& offsets_host, const std::optional<at::Tensor>& initial_state_BHKV);

/// Chunks that _kda_chunk_forward keeps, at most. Known from shapes alone, so that the op can be traced; Int is int64_t
/// or c10::SymInt.
template <typename Int>
Int most_chunks(const Int& tokens, const Int& sequences) {
  return tokens / kKeptChunkRows + sequences;
}

/// The recurrence token by token; differentiable by autograd.
std::tuple<at::Tensor, at::Tensor> reference(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                                             const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH,
                                             const at::Tensor& offsets, const at::Tensor& offsets_host,
                                             const std::optional<at::Tensor>& initial_state_BHKV, double scale);

/// Shapes and dtypes of kda_step_.
void check_step(const char* op, const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                const at::Tensor& decay_log_BHK, const at::Tensor& beta_BH, const at::Tensor& state_SHKV,
                const at::Tensor& slots_B);
void check_step_fused(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                      const at::Tensor& z_BHK, const at::Tensor& beta_logit_BH, const at::Tensor& a_log_H,
                      const at::Tensor& dt_bias_HK, const at::Tensor& state_SHKV, const at::Tensor& slots_B);

/// Shapes, dtypes and offsets of kda_chunk_fused.
void check_fused(const char* op, const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                 const at::Tensor& z_NHK, const at::Tensor& beta_logit_NH, const at::Tensor& a_log_H,
                 const at::Tensor& dt_bias_HK, const at::Tensor& offsets, const at::Tensor& offsets_host,
                 const std::optional<at::Tensor>& initial_state_BHKV);

/// kda_chunk_fused out of the gate, the norms and kda_chunk; differentiable through them.
std::tuple<at::Tensor, at::Tensor> chunk_fused_composed(const at::Tensor& q_NHK, const at::Tensor& k_NHK,
                                                        const at::Tensor& v_NHV, const at::Tensor& z_NHK,
                                                        const at::Tensor& beta_logit_NH, const at::Tensor& a_log_H,
                                                        const at::Tensor& dt_bias_HK, const at::Tensor& offsets,
                                                        const at::Tensor& offsets_host,
                                                        const std::optional<at::Tensor>& initial_state_BHKV,
                                                        double lower_bound, double scale);

constexpr double kNormEps = 1e-6;  // on the sum of squares, as l2_norm

/// x / sqrt(sum of x^2 + kNormEps) along the last dimension, in x's dtype; differentiable.
at::Tensor l2_normalised(const at::Tensor& x);

/// kda_step_fused_ out of the gate, the norms and kda_step_.
at::Tensor step_fused_composed(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                               const at::Tensor& z_BHK, const at::Tensor& beta_logit_BH, const at::Tensor& a_log_H,
                               const at::Tensor& dt_bias_HK, at::Tensor state_SHKV, const at::Tensor& slots_B,
                               double lower_bound, double scale);

/// One step of the recurrence on the given slots of the pool.
at::Tensor step_reference(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                          const at::Tensor& decay_log_BHK, const at::Tensor& beta_BH, at::Tensor state_SHKV,
                          const at::Tensor& slots_B, double scale);

/// The gates in tensor operations; differentiable by autograd.
at::Tensor gate_bounded_reference(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK,
                                  double lower_bound);
at::Tensor gate_softplus_reference(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK);

}  // namespace furlong::kda
