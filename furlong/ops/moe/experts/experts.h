#pragma once

// Routed experts: tokens sorted by expert, one product per expert and matrix, weighted sum in fp32.
//   N tokens   A chosen experts   E experts   L input width (latent or hidden)   I expert width

#include <ATen/core/Tensor.h>

#include "furlong/ops/situ/situ.h"

namespace furlong {

/// sum_a weights_na * w2_e act(w1_e z_n, w3_e z_n) with e = ids_na. z_NL in the compute dtype; w1, w3 [E, I, L] and
/// w2 [E, L, I] are cast to it; ids_NA int64, weights_NA fp32. Product and sum over experts in fp32, returned in z's
/// dtype. Differentiable in z, weights and w1, w2, w3. Deterministic. Schema furlong::moe_experts.
at::Tensor moe_experts(const at::Tensor& z_NL, const at::Tensor& ids_NA, const at::Tensor& weights_NA,
                       const at::Tensor& w1_EIL, const at::Tensor& w3_EIL, const at::Tensor& w2_ELI,
                       const Activation& activation);

}  // namespace furlong
