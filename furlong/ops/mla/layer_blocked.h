#pragma once

// MLA over a long context: keys and values are expanded from latents one block at a time and merged by their
// log-sum-exp, so that expanded heads never exist for the whole context.
//   T query tokens of one sequence   C context entries   H heads   Q = nope + shared key size   E = latent + shared key

#include <ATen/core/Tensor.h>

#include "furlong/ops/common/forward_context.h"

namespace furlong {

struct MlaWidths {
  int64_t num_heads, latent, nope, shared_key, value;
};

/// Query i stands at position past + i and sees entries 0 .. past + i of context_CE (its own included). kv_b is
/// [H (nope + value), latent]. Arithmetic and result in fp32 (fp64 for fp64). Differentiable. In exact mode queries and
/// keys lie in blocks of fixed size on the sequence's own grid, so that a row's bits do not depend on how the sequence
/// was split into calls.
at::Tensor mla_blocked_attention(const at::Tensor& q_THQ, const at::Tensor& context_CE, const at::Tensor& kv_b,
                                 int64_t past, const MlaWidths& widths, double scale, Numerics numerics);

}  // namespace furlong
