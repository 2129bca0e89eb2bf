#pragma once

// The gated MLA token mixer. Expanded form in training and long prefill, absorbed form in decode.
//   N packed tokens   D hidden   H heads

#include <string>

#include "furlong/ops/common/forward_context.h"
#include "furlong/ops/common/param_spec.h"
#include "furlong/ops/common/sequence_layout.h"
#include "furlong/ops/mla/state.h"

namespace furlong {

struct MlaLayerConfig {
  int64_t hidden_size = 0;
  int64_t num_heads = 0;
  int64_t q_lora_rank = 0;  // 0: a single q_proj
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;  // shared key part, not rotated
  int64_t v_head_dim = 0;
  bool output_gate = false;
  bool output_fp32 = true;  // keep the attention output in fp32 up to the gate
  double latent_norm_eps = 1e-6;
  double init_std = 0.02;
};

class MlaLayer {
 public:
  explicit MlaLayer(const MlaLayerConfig& config) : config_(config) {}

  /// q_a_proj, q_a_layernorm, q_b_proj or q_proj; kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj; g_proj; o_proj.
  void declare(ParamList& list, const std::string& prefix);
  LatentCache allocate_state(int64_t slots, at::ScalarType compute_dtype, at::Device device) const;
  at::Tensor forward(const at::Tensor& x_ND, const SequenceLayout& layout, LatentCache* state,
                     const ForwardContext& context) const;

 private:
  MlaLayerConfig config_;
  at::Tensor q_proj_, q_a_proj_, q_a_norm_, q_b_proj_;
  at::Tensor kv_a_proj_, kv_a_norm_, kv_b_proj_;
  at::Tensor g_proj_, o_proj_;
};

}  // namespace furlong
