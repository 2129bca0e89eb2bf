#pragma once

// Argument checks that the backends of the MLA operators share.

#include <ATen/core/Tensor.h>

namespace furlong::mla_detail {

void check_attention(const at::Tensor& q_NHQ, const at::Tensor& k_NHQ, const at::Tensor& v_NHV,
                     const at::Tensor& offsets_host);
void check_absorbed(const at::Tensor& q_NHE, const at::Tensor& cache_SCE, const at::Tensor& offsets,
                    const at::Tensor& slots_B, const at::Tensor& past_B, int64_t latent_size);

}  // namespace furlong::mla_detail
