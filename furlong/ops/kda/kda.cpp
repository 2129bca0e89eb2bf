#include "furlong/ops/kda/kda.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/kda/internal.h"

namespace furlong {

namespace {

using ChunkSignature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                          const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                          const at::Tensor&, const std::optional<at::Tensor>&, double);

void check_dtypes(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& decay_log, const at::Tensor& beta) {
  const at::ScalarType input = q.scalar_type();
  check_argument(input == at::kFloat || input == at::kBFloat16 || input == at::kDouble, op,
                 std::string("q: got ") + c10::toString(input) + ", need Float, BFloat16 or Double");
  const at::ScalarType work = input == at::kDouble ? at::kDouble : at::kFloat;
  check_dtype(op, "k", k, input);
  check_dtype(op, "v", v, input);
  check_dtype(op, "decay_log", decay_log, work);
  check_dtype(op, "beta", beta, work);
}

}  // namespace

namespace kda {

void check_arguments(const char* op, const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                     const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH, const at::Tensor& offsets,
                     const at::Tensor& offsets_host, const std::optional<at::Tensor>& initial_state_BHKV) {
  check_shape(op, "q_NHK", q_NHK, {-1, -1, -1});
  const int64_t N = q_NHK.size(0), H = q_NHK.size(1), K = q_NHK.size(2);
  check_shape(op, "k_NHK", k_NHK, {N, H, K});
  check_shape(op, "v_NHV", v_NHV, {N, H, -1});
  check_shape(op, "decay_log_NHK", decay_log_NHK, {N, H, K});
  check_shape(op, "beta_NH", beta_NH, {N, H});
  check_dtypes(op, q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH);
  check_shape(op, "offsets_host", offsets_host, {-1});
  check_dtype(op, "offsets_host", offsets_host, at::kLong);
  check_argument(offsets_host.is_cpu() && offsets_host.is_contiguous() && offsets_host.numel() > 0, op,
                 "offsets_host: need a contiguous CPU tensor with at least one entry");
  const int64_t B = offsets_host.numel() - 1;
  check_shape(op, "offsets", offsets, {B + 1});
  const auto* starts = offsets_host.const_data_ptr<int64_t>();
  check_argument(starts[0] == 0, op, "offsets_host: got a first entry of " + std::to_string(starts[0]) + ", need 0");
  for (int64_t b = 0; b < B; ++b) {
    check_argument(starts[b] <= starts[b + 1], op, "offsets_host: got falling offsets, need rising ones");
  }
  check_argument(
      starts[B] <= N, op,
      "offsets_host: got " + std::to_string(starts[B]) + " tokens, need at most " + std::to_string(N) + " (rows of q)");
  if (initial_state_BHKV.has_value()) {
    check_shape(op, "initial_state_BHKV", *initial_state_BHKV, {B, H, K, v_NHV.size(2)});
    check_dtype(op, "initial_state_BHKV", *initial_state_BHKV, decay_log_NHK.scalar_type());
  }
}

void check_step(const char* op, const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                const at::Tensor& decay_log_BHK, const at::Tensor& beta_BH, const at::Tensor& state_SHKV,
                const at::Tensor& slots_B) {
  check_shape(op, "q_BHK", q_BHK, {-1, -1, -1});
  const int64_t B = q_BHK.size(0), H = q_BHK.size(1), K = q_BHK.size(2);
  check_shape(op, "k_BHK", k_BHK, {B, H, K});
  check_shape(op, "v_BHV", v_BHV, {B, H, -1});
  check_shape(op, "decay_log_BHK", decay_log_BHK, {B, H, K});
  check_shape(op, "beta_BH", beta_BH, {B, H});
  check_dtypes(op, q_BHK, k_BHK, v_BHV, decay_log_BHK, beta_BH);
  check_shape(op, "state_SHKV", state_SHKV, {-1, H, K, v_BHV.size(2)});
  check_dtype(op, "state_SHKV", state_SHKV, decay_log_BHK.scalar_type());
  check_argument(state_SHKV.is_contiguous(), op, "state_SHKV: need a contiguous pool");
  check_shape(op, "slots_B", slots_B, {B});
  check_dtype(op, "slots_B", slots_B, at::kLong);
}

namespace {

std::tuple<at::Tensor, at::Tensor> chunk_meta(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                                              const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH,
                                              const at::Tensor& offsets, const at::Tensor& offsets_host,
                                              const std::optional<at::Tensor>& /*initial_state_BHKV*/,
                                              double /*scale*/) {
  (void)k_NHK, (void)beta_NH, (void)offsets;
  return {at::empty_like(v_NHV, at::MemoryFormat::Contiguous),
          at::empty_symint({offsets_host.sym_size(0) - 1, q_NHK.sym_size(1), q_NHK.sym_size(2), v_NHV.sym_size(2)},
                           decay_log_NHK.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> chunk_forward_meta(
    const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV, const at::Tensor& decay_log_NHK,
    const at::Tensor& beta_NH, const at::Tensor& offsets, const at::Tensor& offsets_host,
    const std::optional<at::Tensor>& initial_state_BHKV, double scale) {
  auto [out, final_state] =
      chunk_meta(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets, offsets_host, initial_state_BHKV, scale);
  const c10::SymInt chunks = most_chunks<c10::SymInt>(q_NHK.sym_size(0), offsets_host.sym_size(0) - 1);
  return {out, final_state,
          at::empty_symint({chunks, q_NHK.sym_size(1), q_NHK.sym_size(2) + kKeptChunkRows, v_NHV.sym_size(2)},
                           decay_log_NHK.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> chunk_backward_meta(
    const at::Tensor& /*d_out_NHV*/, const std::optional<at::Tensor>& /*d_final_state_BHKV*/, const at::Tensor& q_NHK,
    const at::Tensor& k_NHK, const at::Tensor& v_NHV, const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH,
    const at::Tensor& offsets_host, const at::Tensor& /*kept*/, double /*scale*/) {
  const auto like = [](const at::Tensor& x) { return at::empty_like(x, at::MemoryFormat::Contiguous); };
  return {like(q_NHK),
          like(k_NHK),
          like(v_NHV),
          like(decay_log_NHK),
          like(beta_NH),
          at::empty_symint({offsets_host.sym_size(0) - 1, q_NHK.sym_size(1), q_NHK.sym_size(2), v_NHV.sym_size(2)},
                           decay_log_NHK.options())};
}

at::Tensor step_meta(const at::Tensor& /*q_BHK*/, const at::Tensor& /*k_BHK*/, const at::Tensor& v_BHV,
                     const at::Tensor& /*decay_log_BHK*/, const at::Tensor& /*beta_BH*/, at::Tensor /*state_SHKV*/,
                     const at::Tensor& /*slots_B*/, double /*scale*/) {
  return at::empty_like(v_BHV, at::MemoryFormat::Contiguous);
}

}  // namespace

}  // namespace kda

KdaOutput kda_chunk(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                    const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH, const SequenceLayout& layout,
                    const std::optional<at::Tensor>& initial_state_BHKV, double scale) {
  static const auto op = find_op<ChunkSignature>("furlong::kda_chunk");
  kda::check_arguments("kda_chunk", q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, layout.offsets(),
                       layout.offsets_host(), initial_state_BHKV);
  auto [out, final_state] = op.call(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, layout.offsets(),
                                    layout.offsets_host(), initial_state_BHKV, scale);
  return {std::move(out), std::move(final_state)};
}

KdaOutput kda_reference(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                        const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH, const SequenceLayout& layout,
                        const std::optional<at::Tensor>& initial_state_BHKV, double scale) {
  static const auto op = find_op<ChunkSignature>("furlong::kda_reference");
  auto [out, final_state] = op.call(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, layout.offsets(),
                                    layout.offsets_host(), initial_state_BHKV, scale);
  return {std::move(out), std::move(final_state)};
}

at::Tensor kda_step_(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                     const at::Tensor& decay_log_BHK, const at::Tensor& beta_BH, at::Tensor& state_SHKV,
                     const at::Tensor& slots_B, double scale) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, at::Tensor, const at::Tensor&, double);
  static const auto op = find_op<Signature>("furlong::kda_step_");
  kda::check_step("kda_step_", q_BHK, k_BHK, v_BHV, decay_log_BHK, beta_BH, state_SHKV, slots_B);
  return op.call(q_BHK, k_BHK, v_BHV, decay_log_BHK, beta_BH, state_SHKV, slots_B, scale);
}

}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def(
      "kda_chunk(Tensor q, Tensor k, Tensor v, Tensor decay_log, Tensor beta, Tensor offsets, Tensor offsets_host, "
      "Tensor? initial_state, float scale) -> (Tensor, Tensor)");
  // The forward that keeps each chunk's entering state and corrections, and its gradient; see autograd.cpp.
  m.def(
      "_kda_chunk_forward(Tensor q, Tensor k, Tensor v, Tensor decay_log, Tensor beta, Tensor offsets, "
      "Tensor offsets_host, Tensor? initial_state, float scale) -> (Tensor, Tensor, Tensor)");
  m.def(
      "_kda_chunk_backward(Tensor d_out, Tensor? d_final_state, Tensor q, Tensor k, Tensor v, Tensor decay_log, "
      "Tensor beta, Tensor offsets_host, Tensor kept, float scale) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "kda_reference(Tensor q, Tensor k, Tensor v, Tensor decay_log, Tensor beta, Tensor offsets, Tensor offsets_host, "
      "Tensor? initial_state, float scale) -> (Tensor, Tensor)");
  m.def(
      "kda_step_(Tensor q, Tensor k, Tensor v, Tensor decay_log, Tensor beta, Tensor(a!) state, Tensor slots, "
      "float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("kda_chunk", furlong::kda::chunk_meta);
  m.impl("_kda_chunk_forward", furlong::kda::chunk_forward_meta);
  m.impl("_kda_chunk_backward", furlong::kda::chunk_backward_meta);
  m.impl("kda_step_", furlong::kda::step_meta);
}
