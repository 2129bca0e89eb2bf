// The loss over chunks of tokens: logits of one chunk, their softmax, and where gradients are wanted also the chunk's
// share of both gradients, while its logits are in the cache. Token weights are known in the forward pass, so the
// gradient of the loss is complete there, up to the factor that the backward pass receives.
//
// CPU tensors in fp32 and bf16 use the per-token kernel; CUDA tensors and fp64 the same steps in tensor operations.
//   R tokens of a chunk

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scatter_add.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "furlong/base/parallel.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/cross_entropy/checks.h"
#include "furlong/ops/cross_entropy/rows.h"

namespace furlong {
namespace {

/// The tokens that count. Undefined index: all of them.
struct Tokens {
  at::Tensor hidden_ND, target_N, weight_N;
  at::Tensor index;
};

void check_targets(const at::Tensor& target_N, int64_t vocabulary) {
  const int64_t* target = target_N.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < target_N.size(0); ++n) {
    check_argument(target[n] >= 0 && target[n] < vocabulary, "linear_cross_entropy",
                   std::string("targets_N: got ") + std::to_string(target[n]) + ", need at least 0 and less than " +
                       std::to_string(vocabulary));
  }
}

/// On the CPU ignored tokens are left out, which saves their products. On other devices that would need to wait for
/// their number; they are masked instead. Either way nothing of theirs, a NaN included, reaches a product.
Tokens counted_tokens(const at::Tensor& hidden_ND, const at::Tensor& targets_N, const at::Tensor& token_weight_N,
                      int64_t vocabulary) {
  const at::Tensor weight_N = token_weight_N.to(arithmetic_type(hidden_ND)).contiguous();
  const at::Tensor counted_N = weight_N != 0;
  if (!hidden_ND.is_cpu()) {
    return {at::where(counted_N.unsqueeze(1), hidden_ND, 0.0).to(hidden_ND.scalar_type()),
            at::where(counted_N, targets_N, 0),
            weight_N,
            {}};
  }
  Tokens tokens{hidden_ND.contiguous(), targets_N.contiguous(), weight_N, {}};
  const at::Tensor index = counted_N.nonzero().squeeze(1);
  if (index.size(0) < hidden_ND.size(0)) {
    tokens = {hidden_ND.index_select(0, index), targets_N.index_select(0, index), weight_N.index_select(0, index),
              index};
  }
  check_targets(tokens.target_N, vocabulary);
  return tokens;
}

/// nll_R of a chunk; with `gradient`, logits_RV becomes weight (softmax - onehot).
void softmax_chunk(const at::Tensor& logits_RV, const at::Tensor& target_R, const at::Tensor& weight_R,
                   const at::Tensor& nll_R, bool gradient) {
  if (has_cpu_kernel(logits_RV)) {
    const CrossEntropyRows rows{.size = logits_RV.size(1),
                                .logits = logits_RV.mutable_data_ptr(),
                                .target = target_R.const_data_ptr<int64_t>(),
                                .weight = weight_R.const_data_ptr<float>(),
                                .nll = nll_R.mutable_data_ptr<float>()};
    const CrossEntropyKernels kernels = cross_entropy_kernels(is_bf16(logits_RV));
    const auto kernel = gradient ? kernels.loss_and_gradient : kernels.loss;
    parallel_for(0, logits_RV.size(0), 1, [&](int64_t first, int64_t last) { kernel(rows, first, last); });
    return;
  }
  const at::Tensor target_R1 = target_R.unsqueeze(1);
  at::Tensor log_p_RV = logits_RV.to(nll_R.scalar_type()).log_softmax(-1);
  nll_R.copy_(log_p_RV.gather(1, target_R1).squeeze(1).neg());
  if (!gradient) return;
  at::Tensor p_RV = log_p_RV.exp_();
  p_RV.scatter_add_(1, target_R1, at::ones_like(target_R1, p_RV.options()).neg_());
  logits_RV.copy_(p_RV.mul_(weight_R.unsqueeze(1)));
}

/// Adds dlogits^T hidden to the fp32 sum. bf16 products leave the library rounded; only their sum over chunks is fp32.
void add_head_gradient(at::Tensor& dhead_VD, const at::Tensor& dlogits_RV, const at::Tensor& hidden_RD) {
  if (dhead_VD.scalar_type() == hidden_RD.scalar_type()) {
    at::addmm_out(dhead_VD, dhead_VD, dlogits_RV.t(), hidden_RD);
  } else {
    dhead_VD.add_(at::mm(dlogits_RV.t(), hidden_RD));
  }
}

// 2^21 logits: 8 MiB in fp32, a share of a last-level cache. At least 64 rows keep the products efficient, more than
// 1024 gain nothing.
int64_t chunk_rows(int64_t vocabulary) {
  return std::clamp<int64_t>((int64_t{1} << 21) / std::max<int64_t>(vocabulary, 1), 64, 1024);
}

struct Result {
  at::Tensor loss, nll_N, dhidden_ND, dhead_VD;
};

Result run_chunks(const at::Tensor& hidden_ND, const at::Tensor& head_VD, const at::Tensor& targets_N,
                  const at::Tensor& token_weight_N, bool gradient) {
  check_linear_cross_entropy(hidden_ND, head_VD, targets_N, token_weight_N);
  const at::ScalarType wide = arithmetic_type(hidden_ND);
  const int64_t vocabulary = head_VD.size(0);
  const Tokens tokens = counted_tokens(hidden_ND, targets_N, token_weight_N, vocabulary);
  const at::Tensor head = head_VD.to(hidden_ND.scalar_type()).contiguous();
  const int64_t count = tokens.hidden_ND.size(0);
  const int64_t rows = std::min(chunk_rows(vocabulary), std::max<int64_t>(count, 1));
  const at::Tensor logits = at::empty({rows, vocabulary}, head.options());
  const at::Tensor nll_N = at::empty({count}, head.options().dtype(wide));
  at::Tensor dhidden_ND = gradient ? at::empty_like(tokens.hidden_ND) : at::Tensor();
  at::Tensor dhead_VD = gradient ? at::zeros(head.sizes(), head.options().dtype(wide)) : at::Tensor();
  for (int64_t first = 0; first < count; first += rows) {
    const int64_t last = std::min(first + rows, count);
    const at::Tensor hidden_RD = tokens.hidden_ND.slice(0, first, last);
    at::Tensor logits_RV = logits.slice(0, 0, last - first);
    at::mm_out(logits_RV, hidden_RD, head.t());
    softmax_chunk(logits_RV, tokens.target_N.slice(0, first, last), tokens.weight_N.slice(0, first, last),
                  nll_N.slice(0, first, last), gradient);
    if (!gradient) continue;
    at::Tensor dhidden_RD = dhidden_ND.slice(0, first, last);
    at::mm_out(dhidden_RD, logits_RV, head);
    add_head_gradient(dhead_VD, logits_RV, hidden_RD);
  }
  Result result{(nll_N * tokens.weight_N).sum(at::kDouble).to(wide), nll_N, dhidden_ND, dhead_VD};
  if (gradient) result.dhead_VD = dhead_VD.to(head_VD.scalar_type());
  if (tokens.index.defined()) {
    result.nll_N = at::zeros({hidden_ND.size(0)}, nll_N.options()).index_copy_(0, tokens.index, nll_N);
    if (gradient) {
      result.dhidden_ND = at::zeros(hidden_ND.sizes(), hidden_ND.options()).index_copy_(0, tokens.index, dhidden_ND);
    }
  } else if (!hidden_ND.is_cpu()) {
    result.nll_N = at::where(tokens.weight_N != 0, nll_N, 0.0);
  }
  return result;
}

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy_chunked(const at::Tensor& hidden_ND, const at::Tensor& head_VD,
                                                                const at::Tensor& targets_N,
                                                                const at::Tensor& token_weight_N) {
  const Result result = run_chunks(hidden_ND, head_VD, targets_N, token_weight_N, /*gradient=*/false);
  return {result.loss, result.nll_N};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> with_gradients_chunked(const at::Tensor& hidden_ND,
                                                                                  const at::Tensor& head_VD,
                                                                                  const at::Tensor& targets_N,
                                                                                  const at::Tensor& token_weight_N) {
  const Result result = run_chunks(hidden_ND, head_VD, targets_N, token_weight_N, /*gradient=*/true);
  return {result.loss, result.nll_N, result.dhidden_ND, result.dhead_VD};
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("linear_cross_entropy", furlong::linear_cross_entropy_chunked);
  m.impl("_linear_cross_entropy_with_gradients", furlong::with_gradients_chunked);
}

TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("linear_cross_entropy", furlong::linear_cross_entropy_chunked);
  m.impl("_linear_cross_entropy_with_gradients", furlong::with_gradients_chunked);
}
