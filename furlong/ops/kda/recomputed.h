#pragma once

// Gradient of the chunk form that keeps nothing but its inputs: the CUDA kernels recompute the rest.
//   N packed tokens   B sequences   H heads   K key size   V value size

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace furlong::kda {

/// Inputs of kda_chunk (no a_log: gate is decay_log, beta is beta) or of kda_chunk_fused (gate is z, beta its logit).
struct ChunkCall {
  at::Tensor q_NHK, k_NHK, v_NHV, gate_NHK, beta_NH;
  std::optional<at::Tensor> a_log_H, dt_bias_HK;
  at::Tensor offsets, offsets_host;
  std::optional<at::Tensor> initial_state_BHKV;
  double lower_bound = 0;  // 0: softplus gate
  double scale = 1;
};

/// Whether _kda_chunk_gradient takes these inputs.
bool has_recomputed_gradient(const ChunkCall& in);

/// Output and final state, differentiable in every tensor.
std::tuple<at::Tensor, at::Tensor> chunk_recomputed(const ChunkCall& in);

}  // namespace furlong::kda
