// kda_chunk_fused: kda_chunk with the gate, beta's sigmoid and the L2 norms of q and k inside; and the gradient of both
// for kernels that recompute instead of keeping states. Everywhere but in the CUDA kernels it is the composition of its
// parts.
//   N packed tokens   B sequences   H heads   K key size   V value size

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/kda/internal.h"
#include "furlong/ops/kda/kda.h"
#include "furlong/ops/kda/recomputed.h"

namespace furlong {

namespace kda {

using Output = std::tuple<at::Tensor, at::Tensor>;
using Optional = std::optional<at::Tensor>;

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using ChunkSignature = Output(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const at::Tensor&, const at::Tensor&, const Optional&, double);
using FusedSignature = Output(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const Optional&, double, double);
using Gradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using GradientSignature = Gradients(const at::Tensor&, const Optional&, const at::Tensor&, const at::Tensor&,
                                    const at::Tensor&, const at::Tensor&, const at::Tensor&, const Optional&,
                                    const Optional&, const at::Tensor&, const at::Tensor&, const Optional&, double,
                                    double);

Optional optional(const at::Tensor& x) {
  return x.defined() ? Optional(x) : std::nullopt;
}

/// The op itself, below autograd.
Output call_forward(const ChunkCall& in) {
  static const auto given = find_op<ChunkSignature>("furlong::kda_chunk");
  static const auto fused = find_op<FusedSignature>("furlong::kda_chunk_fused");
  at::AutoDispatchBelowADInplaceOrView guard;
  if (!in.a_log_H.has_value()) {
    return given.call(in.q_NHK, in.k_NHK, in.v_NHV, in.gate_NHK, in.beta_NH, in.offsets, in.offsets_host,
                      in.initial_state_BHKV, in.scale);
  }
  return fused.call(in.q_NHK, in.k_NHK, in.v_NHV, in.gate_NHK, in.beta_NH, *in.a_log_H, *in.dt_bias_HK, in.offsets,
                    in.offsets_host, in.initial_state_BHKV, in.lower_bound, in.scale);
}

class RecomputedFunction : public torch::autograd::Function<RecomputedFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& q_NHK, const at::Tensor& k_NHK,
                               const at::Tensor& v_NHV, const at::Tensor& gate_NHK, const at::Tensor& beta_NH,
                               const Optional& a_log_H, const Optional& dt_bias_HK, const at::Tensor& offsets,
                               const at::Tensor& offsets_host, const Optional& initial_state_BHKV, double lower_bound,
                               double scale) {
    auto [out, final_state] = call_forward({q_NHK, k_NHK, v_NHV, gate_NHK, beta_NH, a_log_H, dt_bias_HK, offsets,
                                            offsets_host, initial_state_BHKV, lower_bound, scale});
    context->save_for_backward({q_NHK, k_NHK, v_NHV, gate_NHK, beta_NH, a_log_H.value_or(at::Tensor()),
                                dt_bias_HK.value_or(at::Tensor()), offsets, offsets_host,
                                initial_state_BHKV.value_or(at::Tensor())});
    context->saved_data["lower_bound"] = lower_bound;
    context->saved_data["scale"] = scale;
    context->set_materialize_grads(false);
    return {out, final_state};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op = find_op<GradientSignature>("furlong::_kda_chunk_gradient");
    const variable_list x = context->get_saved_variables();
    const at::Tensor d_out = gradients[0].defined() ? gradients[0] : at::zeros_like(x[2]);
    auto [d_q, d_k, d_v, d_gate, d_beta, d_a_log, d_dt_bias, d_initial] =
        op.call(d_out, optional(gradients[1]), x[0], x[1], x[2], x[3], x[4], optional(x[5]), optional(x[6]), x[7], x[8],
                optional(x[9]), context->saved_data["lower_bound"].toDouble(), context->saved_data["scale"].toDouble());
    if (!x[5].defined()) d_a_log = d_dt_bias = at::Tensor();
    if (!x[9].defined()) d_initial = at::Tensor();
    return {d_q, d_k, d_v, d_gate, d_beta, d_a_log, d_dt_bias, {}, {}, d_initial, {}, {}};
  }
};

bool wants_gradient(const ChunkCall& in) {
  const auto wanted = [](const Optional& x) { return x.has_value() && needs_gradient(*x); };
  return needs_gradient(in.q_NHK, in.k_NHK, in.v_NHV, in.gate_NHK, in.beta_NH) || wanted(in.a_log_H) ||
         wanted(in.dt_bias_HK) || wanted(in.initial_state_BHKV);
}

Output fused_autograd(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                      const at::Tensor& z_NHK, const at::Tensor& beta_logit_NH, const at::Tensor& a_log_H,
                      const at::Tensor& dt_bias_HK, const at::Tensor& offsets, const at::Tensor& offsets_host,
                      const Optional& initial_state_BHKV, double lower_bound, double scale) {
  const ChunkCall call{q_NHK,       k_NHK,      v_NHV,   z_NHK,        beta_logit_NH,
                       a_log_H,     dt_bias_HK, offsets, offsets_host, initial_state_BHKV,
                       lower_bound, scale};
  if (!wants_gradient(call)) return call_forward(call);
  if (has_recomputed_gradient(call)) return chunk_recomputed(call);
  return chunk_fused_composed(q_NHK, k_NHK, v_NHV, z_NHK, beta_logit_NH, a_log_H, dt_bias_HK, offsets, offsets_host,
                              initial_state_BHKV, lower_bound, scale);
}

Output fused_cpu(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV, const at::Tensor& z_NHK,
                 const at::Tensor& beta_logit_NH, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK,
                 const at::Tensor& offsets, const at::Tensor& offsets_host, const Optional& initial_state_BHKV,
                 double lower_bound, double scale) {
  check_fused("kda_chunk_fused", q_NHK, k_NHK, v_NHV, z_NHK, beta_logit_NH, a_log_H, dt_bias_HK, offsets, offsets_host,
              initial_state_BHKV);
  return chunk_fused_composed(q_NHK, k_NHK, v_NHV, z_NHK, beta_logit_NH, a_log_H, dt_bias_HK, offsets, offsets_host,
                              initial_state_BHKV, lower_bound, scale);
}

Output fused_meta(const at::Tensor& q_NHK, const at::Tensor& /*k_NHK*/, const at::Tensor& v_NHV,
                  const at::Tensor& /*z_NHK*/, const at::Tensor& /*beta_logit_NH*/, const at::Tensor& a_log_H,
                  const at::Tensor& /*dt_bias_HK*/, const at::Tensor& /*offsets*/, const at::Tensor& offsets_host,
                  const Optional& /*initial_state_BHKV*/, double /*lower_bound*/, double /*scale*/) {
  return {at::empty_like(v_NHV, at::MemoryFormat::Contiguous),
          at::empty_symint({offsets_host.sym_size(0) - 1, q_NHK.sym_size(1), q_NHK.sym_size(2), v_NHV.sym_size(2)},
                           a_log_H.options())};
}

Gradients gradient_meta(const at::Tensor& /*d_out_NHV*/, const Optional& /*d_final_state_BHKV*/,
                        const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                        const at::Tensor& gate_NHK, const at::Tensor& beta_NH, const Optional& /*a_log_H*/,
                        const Optional& /*dt_bias_HK*/, const at::Tensor& /*offsets*/, const at::Tensor& offsets_host,
                        const Optional& /*initial_state_BHKV*/, double /*lower_bound*/, double /*scale*/) {
  const auto like = [](const at::Tensor& x) { return at::empty_like(x, at::MemoryFormat::Contiguous); };
  const auto fp32 = q_NHK.options().dtype(at::kFloat);
  const c10::SymInt H = q_NHK.sym_size(1), K = q_NHK.sym_size(2);
  return {like(q_NHK),
          like(k_NHK),
          like(v_NHV),
          like(gate_NHK),
          like(beta_NH),
          at::empty_symint({H}, fp32),
          at::empty_symint({H, K}, fp32),
          at::empty_symint({offsets_host.sym_size(0) - 1, H, K, v_NHV.sym_size(2)}, fp32)};
}

}  // namespace

void check_fused(const char* op, const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                 const at::Tensor& z_NHK, const at::Tensor& beta_logit_NH, const at::Tensor& a_log_H,
                 const at::Tensor& dt_bias_HK, const at::Tensor& offsets, const at::Tensor& offsets_host,
                 const std::optional<at::Tensor>& initial_state_BHKV) {
  const at::ScalarType work = arithmetic_type(q_NHK);
  const auto raw = [&](const char* name, const at::Tensor& x) {
    check_argument(x.scalar_type() == work || is_bf16(x), op,
                   std::string(name) + ": got " + c10::toString(x.scalar_type()) + ", need " + c10::toString(work) +
                       " or BFloat16");
    // The shape alone counts from here on: a view of one element with the dtype that the plain op asks for.
    return at::empty({}, x.options().dtype(work)).expand(x.sizes());
  };
  check_shape(op, "z_NHK", z_NHK, {-1, -1, -1});
  check_shape(op, "a_log_H", a_log_H, {z_NHK.size(1)});
  check_shape(op, "dt_bias_HK", dt_bias_HK, {z_NHK.size(1), z_NHK.size(2)});
  check_dtype(op, "a_log_H", a_log_H, work);
  check_dtype(op, "dt_bias_HK", dt_bias_HK, work);
  check_arguments(op, q_NHK, k_NHK, v_NHV, raw("z_NHK", z_NHK), raw("beta_logit_NH", beta_logit_NH), offsets,
                  offsets_host, initial_state_BHKV);
}

bool has_recomputed_gradient(const ChunkCall& in) {
  if (!kCudaKernels || !in.q_NHK.is_cuda() || !has_kernel(in.q_NHK)) return false;
  const int64_t K = in.q_NHK.size(2), V = in.v_NHV.size(2);
  if (!in.a_log_H.has_value()) return K <= 256 && V <= 256;
  return is_bf16(in.q_NHK) && K == V && (K == 64 || K == 128);
}

Output chunk_recomputed(const ChunkCall& in) {
  const variable_list result =
      RecomputedFunction::apply(in.q_NHK, in.k_NHK, in.v_NHV, in.gate_NHK, in.beta_NH, in.a_log_H, in.dt_bias_HK,
                                in.offsets, in.offsets_host, in.initial_state_BHKV, in.lower_bound, in.scale);
  return {result[0], result[1]};
}

Output chunk_fused_composed(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                            const at::Tensor& z_NHK, const at::Tensor& beta_logit_NH, const at::Tensor& a_log_H,
                            const at::Tensor& dt_bias_HK, const at::Tensor& offsets, const at::Tensor& offsets_host,
                            const Optional& initial_state_BHKV, double lower_bound, double scale) {
  static const auto bounded =
      find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, double)>("furlong::kda_gate_bounded");
  static const auto softplus =
      find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>("furlong::kda_gate_softplus");
  static const auto chunk = find_op<ChunkSignature>("furlong::kda_chunk");
  const at::ScalarType work = arithmetic_type(q_NHK);
  const at::Tensor z = work == at::kDouble ? z_NHK.to(work) : z_NHK;
  const at::Tensor decay_log =
      lower_bound < 0 ? bounded.call(z, a_log_H, dt_bias_HK, lower_bound) : softplus.call(z, a_log_H, dt_bias_HK);
  return chunk.call(l2_normalised(q_NHK), l2_normalised(k_NHK), v_NHV, decay_log, at::sigmoid(beta_logit_NH.to(work)),
                    offsets, offsets_host, initial_state_BHKV, scale);
}

at::Tensor l2_normalised(const at::Tensor& x) {
  const at::Tensor wide = x.to(arithmetic_type(x));
  return (wide * (wide.square().sum(-1, /*keepdim=*/true) + kNormEps).rsqrt()).to(x.scalar_type());
}

}  // namespace kda

KdaOutput kda_chunk_fused(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                          const at::Tensor& z_NHK, const at::Tensor& beta_logit_NH, const at::Tensor& a_log_H,
                          const at::Tensor& dt_bias_HK, const SequenceLayout& layout,
                          const std::optional<at::Tensor>& initial_state_BHKV, double lower_bound, double scale) {
  static const auto op = find_op<kda::FusedSignature>("furlong::kda_chunk_fused");
  kda::check_fused("kda_chunk_fused", q_NHK, k_NHK, v_NHV, z_NHK, beta_logit_NH, a_log_H, dt_bias_HK, layout.offsets(),
                   layout.offsets_host(), initial_state_BHKV);
  auto [out, final_state] = op.call(q_NHK, k_NHK, v_NHV, z_NHK, beta_logit_NH, a_log_H, dt_bias_HK, layout.offsets(),
                                    layout.offsets_host(), initial_state_BHKV, lower_bound, scale);
  return {std::move(out), std::move(final_state)};
}

}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def(
      "kda_chunk_fused(Tensor q, Tensor k, Tensor v, Tensor z, Tensor beta_logit, Tensor a_log, Tensor dt_bias, "
      "Tensor offsets, Tensor offsets_host, Tensor? initial_state, float lower_bound, float scale) -> (Tensor, "
      "Tensor)");
  // Gradient of kda_chunk (no a_log) and kda_chunk_fused on CUDA tensors.
  m.def(
      "_kda_chunk_gradient(Tensor d_out, Tensor? d_final_state, Tensor q, Tensor k, Tensor v, Tensor gate, Tensor "
      "beta, "
      "Tensor? a_log, Tensor? dt_bias, Tensor offsets, Tensor offsets_host, Tensor? initial_state, float lower_bound, "
      "float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("kda_chunk_fused", furlong::kda::fused_cpu);
}

#ifndef FURLONG_CUDA
TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("kda_chunk_fused", furlong::kda::fused_cpu);
}
#endif

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("kda_chunk_fused", furlong::kda::fused_meta);
  m.impl("_kda_chunk_gradient", furlong::kda::gradient_meta);
}

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("kda_chunk_fused", furlong::kda::fused_autograd);
}
