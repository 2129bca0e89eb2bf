#pragma once

// Multi-head latent attention (MLA) without positional encoding: the attention products.
//   N packed query tokens   B sequences   S slots   H heads   Q = nope + rope key size   V value size
//   L latent size   R shared key size ("rope" dims, never rotated here)   C cache capacity
//
// A token's cache entry is its RMS-normalised latent c (L) followed by the shared key kappa (R), never expanded heads.

#include <ATen/core/Tensor.h>

#include "furlong/ops/common/sequence_layout.h"

namespace furlong {

/// Expanded form: causal softmax attention inside each sequence of fresh tokens. q_NHQ, k_NHQ, v_NHV -> out_NHV.
/// Softmax fp32. Differentiable. Schema furlong::mla_attention.
at::Tensor mla_attention(const at::Tensor& q_NHQ, const at::Tensor& k_NHQ, const at::Tensor& v_NHV,
                         const SequenceLayout& layout, double scale);

/// Absorbed form over a latent cache that already holds the new tokens: query i of sequence b sees entries
/// 0 .. past[b] + i of slot slots[b]. q_NHE with E = L + R (q absorbed through W_k | q of the shared key);
/// cache_SCE. Returns u_NHL, the mix of latents. Not differentiable. Schema furlong::mla_absorbed.
at::Tensor mla_absorbed(const at::Tensor& q_NHE, const at::Tensor& cache_SCE, const SequenceLayout& layout,
                        int64_t latent_size, double scale);

}  // namespace furlong
