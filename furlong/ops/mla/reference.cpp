// The MLA products in plain tensor operations: the oracle, and the path of devices without a kernel of their own.
//   N packed query tokens   B sequences   S slots   H heads   Q key size   V value size   E = latent + shared key
//   C cache capacity

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/mla/mla_op.h"

namespace furlong::mla_detail {

namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

at::Tensor attention_reference(const at::Tensor& q_NHQ, const at::Tensor& k_NHQ, const at::Tensor& v_NHV,
                               const at::Tensor& offsets_host, double scale) {
  check_attention(q_NHQ, k_NHQ, v_NHV, offsets_host);
  const at::ScalarType wide = arithmetic_type(q_NHQ);
  const int64_t* offsets = offsets_host.const_data_ptr<int64_t>();
  std::vector<at::Tensor> parts;
  int64_t end = 0;
  for (int64_t b = 0; b + 1 < offsets_host.size(0); ++b) {
    const int64_t start = offsets[b], length = offsets[b + 1] - start;
    end = offsets[b + 1];
    const auto rows = [&](const at::Tensor& x) { return x.narrow(0, start, length).to(wide); };
    const at::Tensor scores_HTT = at::einsum("thq,shq->hts", {rows(q_NHQ), rows(k_NHQ)}) * scale;
    const at::Tensor visible_TT = at::ones({length, length}, q_NHQ.options().dtype(at::kBool)).tril();
    const at::Tensor p_HTT = at::softmax(scores_HTT.masked_fill(visible_TT.logical_not(), kMinusInfinity), -1);
    parts.push_back(at::einsum("hts,shv->thv", {p_HTT, rows(v_NHV)}).to(q_NHQ.scalar_type()));
  }
  parts.push_back(at::zeros({q_NHQ.size(0) - end, v_NHV.size(1), v_NHV.size(2)}, v_NHV.options()));
  return at::cat(parts);
}

at::Tensor absorbed_reference(const at::Tensor& q_NHE, const at::Tensor& cache_SCE, const at::Tensor& offsets,
                              const at::Tensor& slots_B, const at::Tensor& past_B, int64_t latent_size, double scale) {
  check_absorbed(q_NHE, cache_SCE, offsets, slots_B, past_B, latent_size);
  const at::ScalarType wide = arithmetic_type(q_NHE);
  const int64_t sequences = slots_B.size(0);
  if (sequences == 0 || q_NHE.size(0) == 0) {
    return at::zeros({q_NHE.size(0), q_NHE.size(1), latent_size}, q_NHE.options());
  }
  const at::Tensor row_N = at::arange(q_NHE.size(0), offsets.options());
  const at::Tensor found_N = at::searchsorted(offsets, row_N, /*out_int32=*/false, /*right=*/true) - 1;
  const at::Tensor valid_N = found_N < sequences;
  const at::Tensor sequence_N = found_N.clamp_max(sequences - 1);
  const at::Tensor last_N = past_B.index_select(0, sequence_N) + row_N - offsets.index_select(0, sequence_N);
  const at::Tensor entry_C = at::arange(cache_SCE.size(1), offsets.options());
  const at::Tensor visible_NC = (entry_C.unsqueeze(0) <= last_N.unsqueeze(1)).logical_and(valid_N.unsqueeze(1));
  // Entries past the length are undefined memory: replaced, not multiplied by zero.
  const at::Tensor cache_NCE = cache_SCE.index_select(0, slots_B.index_select(0, sequence_N)).to(wide);
  const at::Tensor keys_NCE = at::where(visible_NC.unsqueeze(-1), cache_NCE, 0.0);
  const at::Tensor q_valid = at::where(valid_N.view({-1, 1, 1}), q_NHE.to(wide), 0.0);
  const at::Tensor scores_NHC = at::einsum("nhe,nce->nhc", {q_valid, keys_NCE}) * scale;
  const at::Tensor masked_NHC = scores_NHC.masked_fill(visible_NC.logical_not().unsqueeze(1), kMinusInfinity);
  const at::Tensor p_NHC = at::where(valid_N.view({-1, 1, 1}), at::softmax(masked_NHC, -1), 0.0);
  return at::einsum("nhc,ncl->nhl", {p_NHC, keys_NCE.narrow(2, 0, latent_size)}).to(q_NHE.scalar_type());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("mla_attention_reference(Tensor q, Tensor k, Tensor v, Tensor offsets_host, float scale) -> Tensor");
  m.def(
      "mla_absorbed_reference(Tensor q, Tensor cache, Tensor offsets, Tensor slots, Tensor past, int latent_size, "
      "float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("mla_attention_reference", attention_reference);
  m.impl("mla_absorbed_reference", absorbed_reference);
}

TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("mla_absorbed", absorbed_reference);
}

}  // namespace furlong::mla_detail
