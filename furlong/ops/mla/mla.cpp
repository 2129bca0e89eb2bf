// Schemas, argument checks, shapes and the C++ entries of mla_attention and mla_absorbed.

#include "furlong/ops/mla/mla.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/mla/mla_op.h"

namespace furlong {

namespace mla_detail {

void check_attention(const at::Tensor& q_NHQ, const at::Tensor& k_NHQ, const at::Tensor& v_NHV,
                     const at::Tensor& offsets_host) {
  const char* op = "mla_attention";
  check_shape(op, "q_NHQ", q_NHQ, {-1, -1, -1});
  check_shape(op, "k_NHQ", k_NHQ, {q_NHQ.size(0), q_NHQ.size(1), q_NHQ.size(2)});
  check_shape(op, "v_NHV", v_NHV, {q_NHQ.size(0), q_NHQ.size(1), -1});
  check_dtype(op, "k_NHQ", k_NHQ, q_NHQ.scalar_type());
  check_dtype(op, "v_NHV", v_NHV, q_NHQ.scalar_type());
  check_shape(op, "offsets_host", offsets_host, {-1});
  check_dtype(op, "offsets_host", offsets_host, at::kLong);
}

void check_absorbed(const at::Tensor& q_NHE, const at::Tensor& cache_SCE, const at::Tensor& offsets,
                    const at::Tensor& slots_B, const at::Tensor& past_B, int64_t latent_size) {
  const char* op = "mla_absorbed";
  check_shape(op, "q_NHE", q_NHE, {-1, -1, -1});
  check_shape(op, "cache_SCE", cache_SCE, {-1, -1, q_NHE.size(2)});
  check_argument(latent_size >= 1 && latent_size <= q_NHE.size(2), op,
                 "latent_size: got " + std::to_string(latent_size) + ", need 1 to " + std::to_string(q_NHE.size(2)));
  check_shape(op, "offsets", offsets, {-1});
  check_argument(offsets.size(0) >= 1, op, "offsets: got no entry");
  check_shape(op, "slots_B", slots_B, {offsets.size(0) - 1});
  check_shape(op, "past_B", past_B, {offsets.size(0) - 1});
  check_dtype(op, "offsets", offsets, at::kLong);
  check_dtype(op, "slots_B", slots_B, at::kLong);
  check_dtype(op, "past_B", past_B, at::kLong);
}

namespace {

at::Tensor attention_meta(const at::Tensor& q_NHQ, const at::Tensor& k_NHQ, const at::Tensor& v_NHV,
                          const at::Tensor& offsets_host, double /*scale*/) {
  check_attention(q_NHQ, k_NHQ, v_NHV, offsets_host);
  return at::empty_like(v_NHV, at::MemoryFormat::Contiguous);
}

at::Tensor absorbed_meta(const at::Tensor& q_NHE, const at::Tensor& cache_SCE, const at::Tensor& offsets,
                         const at::Tensor& slots_B, const at::Tensor& past_B, int64_t latent_size, double /*scale*/) {
  check_absorbed(q_NHE, cache_SCE, offsets, slots_B, past_B, latent_size);
  return at::empty({q_NHE.size(0), q_NHE.size(1), latent_size}, q_NHE.options());
}

}  // namespace

}  // namespace mla_detail

at::Tensor mla_attention(const at::Tensor& q_NHQ, const at::Tensor& k_NHQ, const at::Tensor& v_NHV,
                         const SequenceLayout& layout, double scale) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double);
  static const auto op = find_op<Signature>("furlong::mla_attention");
  return op.call(q_NHQ, k_NHQ, v_NHV, layout.offsets_host(), scale);
}

at::Tensor mla_absorbed(const at::Tensor& q_NHE, const at::Tensor& cache_SCE, const SequenceLayout& layout,
                        int64_t latent_size, double scale) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, int64_t, double);
  static const auto op = find_op<Signature>("furlong::mla_absorbed");
  check_argument(layout.has_state(), "mla_absorbed", "layout: has no state slots");
  return op.call(q_NHE, cache_SCE, layout.offsets(), layout.slots(), layout.past(), latent_size, scale);
}

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("mla_attention(Tensor q, Tensor k, Tensor v, Tensor offsets_host, float scale) -> Tensor");
  m.def(
      "mla_absorbed(Tensor q, Tensor cache, Tensor offsets, Tensor slots, Tensor past, int latent_size, float scale) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("mla_attention", mla_detail::attention_meta);
  m.impl("mla_absorbed", mla_detail::absorbed_meta);
}

}  // namespace furlong
