#pragma once

// The KDA token mixer: projections, short convolution with SiLU, L2 norm, gate, recurrence, gated output norm, output
// projection. spec: README.md in this folder.
//   N packed tokens   D hidden size   H heads   K key size = V value size

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "furlong/ops/common/forward_context.h"
#include "furlong/ops/common/param_spec.h"
#include "furlong/ops/common/sequence_layout.h"
#include "furlong/ops/kda/state.h"

namespace furlong {

struct KdaLayerConfig {
  int64_t hidden_size = 0;
  int64_t num_heads = 0;
  int64_t head_size = 0;  // K = V
  int64_t conv_kernel = 4;
  std::optional<double> gate_lower_bound = {};  // set: bounded gate; unset: softplus gate
  bool full_rank_gate = false;                  // output gate: g_proj, else g_a_proj and g_b_proj of rank head_size
  double norm_eps = 1e-5;
  double init_std = 0.02;
};

class KdaLayer {
 public:
  explicit KdaLayer(const KdaLayerConfig& config) : config_(config) {}

  /// Published names below `prefix` ("model.layers.0.self_attn."): q_proj.weight ... o_proj.weight.
  void declare(ParamList& list, const std::string& prefix);
  KdaLayerState allocate_state(int64_t slots, at::ScalarType compute_dtype, at::Device device) const;

  /// x_ND is the normalised layer input; the result has its shape and dtype. With `state` (not under autograd) the
  /// layout must have slots: states are read and updated in place.
  at::Tensor forward(const at::Tensor& x_ND, const SequenceLayout& layout, KdaLayerState* state,
                     const ForwardContext& context) const;

 private:
  /// Convolution of q, k or v (part 0, 1, 2: its third of the tail pool).
  at::Tensor convolve(const at::Tensor& x_NP, const at::Tensor& weight_PW, int64_t part, const SequenceLayout& layout,
                      KdaLayerState* state, bool step) const;
  at::Tensor recur(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                   const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH, const SequenceLayout& layout,
                   KdaLayerState* state, bool step) const;

  KdaLayerConfig config_;
  at::Tensor q_proj_, k_proj_, v_proj_, o_proj_;  // [P, D] x3, [D, P]; P = H K
  at::Tensor q_conv_, k_conv_, v_conv_;           // [P, conv_kernel]; published as [P, 1, conv_kernel]
  at::Tensor f_a_proj_, f_b_proj_, b_proj_;       // decay gate [K, D], [P, K]; beta [H, D]
  at::Tensor a_log_, dt_bias_;                    // [H], [P]
  at::Tensor g_proj_, g_a_proj_, g_b_proj_;       // output gate
  at::Tensor o_norm_;                             // [V]
};

}  // namespace furlong
