#pragma once

// What a forward pass tells every layer, and what a layer reports back.

#include <ATen/core/Tensor.h>

namespace furlong {

enum class Numerics {
  kFast,   // free row counts, step form, absorbed MLA
  kExact,  // a row's bits do not depend on how the tokens are split, packed or batched
};

/// Measurements of one layer in one forward pass. Statistics are one-element tensors on the data's device, so that
/// taking them costs no synchronisation. Undefined where the layer has no such mechanism.
struct LayerRecord {
  at::Tensor expert_ids_NA = {};    // int64, the A experts chosen for each token, in the order of selection
  at::Tensor margin_N = {};         // fp32, last chosen minus first not chosen biased score
  at::Tensor load_E = {};           // int64, tokens sent to each expert
  at::Tensor decay_saturated = {};  // share of decays within 1 % of the gate's lower bound (unbounded gate: below -5)
  at::Tensor decay_open = {};       // share of decays above -0.01 (hardly forgetting)
  at::Tensor beta_mean = {};
  at::Tensor attention_depth_weight_S = {};  // mean weight of each source in the attention read of attention residuals
  at::Tensor mlp_depth_weight_S = {};        // the same for the read before the MLP
};

struct ForwardContext {
  Numerics numerics = Numerics::kFast;
  bool training = false;                 // a first training forward: the balance histogram is counted.
                                         // False in evaluation, serving and recomputation.
  at::Tensor forced_expert_ids_NA = {};  // if defined: route to these experts (replay), weights recomputed
  LayerRecord* record = nullptr;         // where to put measurements; null: take none
};

}  // namespace furlong
