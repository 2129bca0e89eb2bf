// kda_step_fused_: kda_step_ with the gate, beta's sigmoid and the L2 norms of q and k inside. On the CPU and in fp64
// it is the composition of those; CUDA has one kernel (cuda/step.cu).
//   B sequences   S state slots   H heads   K key size   V value size

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/kda/internal.h"
#include "furlong/ops/kda/kda.h"

namespace furlong {

namespace kda {

namespace {

using FusedSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                  const at::Tensor&, const at::Tensor&, const at::Tensor&, at::Tensor,
                                  const at::Tensor&, double, double);

}  // namespace

void check_step_fused(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                      const at::Tensor& z_BHK, const at::Tensor& beta_logit_BH, const at::Tensor& a_log_H,
                      const at::Tensor& dt_bias_HK, const at::Tensor& state_SHKV, const at::Tensor& slots_B) {
  const char* op = "kda_step_fused_";
  const at::ScalarType work = arithmetic_type(q_BHK);
  check_shape(op, "z_BHK", z_BHK, {-1, -1, -1});
  check_shape(op, "beta_logit_BH", beta_logit_BH, {-1, -1});
  for (const auto& [name, x] : {std::pair{"z_BHK", &z_BHK}, {"beta_logit_BH", &beta_logit_BH}}) {
    check_argument(x->scalar_type() == work || is_bf16(*x), op,
                   std::string(name) + ": got " + c10::toString(x->scalar_type()) + ", need " + c10::toString(work) +
                       " or BFloat16");
  }
  check_shape(op, "a_log_H", a_log_H, {z_BHK.size(1)});
  check_shape(op, "dt_bias_HK", dt_bias_HK, {z_BHK.size(1), z_BHK.size(2)});
  check_dtype(op, "a_log_H", a_log_H, work);
  check_dtype(op, "dt_bias_HK", dt_bias_HK, work);
  check_step(op, q_BHK, k_BHK, v_BHV, z_BHK.to(work), beta_logit_BH.to(work), state_SHKV, slots_B);
}

at::Tensor step_fused_composed(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                               const at::Tensor& z_BHK, const at::Tensor& beta_logit_BH, const at::Tensor& a_log_H,
                               const at::Tensor& dt_bias_HK, at::Tensor state_SHKV, const at::Tensor& slots_B,
                               double lower_bound, double scale) {
  check_step_fused(q_BHK, k_BHK, v_BHV, z_BHK, beta_logit_BH, a_log_H, dt_bias_HK, state_SHKV, slots_B);
  const at::ScalarType work = arithmetic_type(q_BHK);
  const at::Tensor z = work == at::kDouble ? z_BHK.to(work) : z_BHK;
  const at::Tensor decay_log = lower_bound < 0 ? kda_gate_bounded(z, a_log_H, dt_bias_HK, lower_bound)
                                               : kda_gate_softplus(z, a_log_H, dt_bias_HK);
  return kda_step_(l2_normalised(q_BHK), l2_normalised(k_BHK), v_BHV, decay_log, at::sigmoid(beta_logit_BH.to(work)),
                   state_SHKV, slots_B, scale);
}

namespace {

at::Tensor step_fused_meta(const at::Tensor& /*q_BHK*/, const at::Tensor& /*k_BHK*/, const at::Tensor& v_BHV,
                           const at::Tensor& /*z_BHK*/, const at::Tensor& /*beta_logit_BH*/,
                           const at::Tensor& /*a_log_H*/, const at::Tensor& /*dt_bias_HK*/, at::Tensor /*state_SHKV*/,
                           const at::Tensor& /*slots_B*/, double /*lower_bound*/, double /*scale*/) {
  return at::empty_like(v_BHV, at::MemoryFormat::Contiguous);
}

at::Tensor step_fused_autograd(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                               const at::Tensor& z_BHK, const at::Tensor& beta_logit_BH, const at::Tensor& a_log_H,
                               const at::Tensor& dt_bias_HK, at::Tensor state_SHKV, const at::Tensor& slots_B,
                               double lower_bound, double scale) {
  if (at::GradMode::is_enabled()) {
    for (const at::Tensor& x : {q_BHK, k_BHK, v_BHV, z_BHK, beta_logit_BH, a_log_H, dt_bias_HK, state_SHKV}) {
      check_argument(!x.requires_grad(), "kda_step_fused_",
                     "got an input that requires a gradient: the step updates its state in place; use kda_chunk");
    }
  }
  static const auto op = find_op<FusedSignature>("furlong::kda_step_fused_");
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(q_BHK, k_BHK, v_BHV, z_BHK, beta_logit_BH, a_log_H, dt_bias_HK, state_SHKV, slots_B, lower_bound,
                 scale);
}

}  // namespace

}  // namespace kda

at::Tensor kda_step_fused_(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                           const at::Tensor& z_BHK, const at::Tensor& beta_logit_BH, const at::Tensor& a_log_H,
                           const at::Tensor& dt_bias_HK, at::Tensor& state_SHKV, const at::Tensor& slots_B,
                           double lower_bound, double scale) {
  static const auto op = find_op<kda::FusedSignature>("furlong::kda_step_fused_");
  return op.call(q_BHK, k_BHK, v_BHV, z_BHK, beta_logit_BH, a_log_H, dt_bias_HK, state_SHKV, slots_B, lower_bound,
                 scale);
}

}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def(
      "kda_step_fused_(Tensor q, Tensor k, Tensor v, Tensor z, Tensor beta_logit, Tensor a_log, Tensor dt_bias, "
      "Tensor(a!) state, Tensor slots, float lower_bound, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("kda_step_fused_", furlong::kda::step_fused_composed);
}

#ifndef FURLONG_CUDA
TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("kda_step_fused_", furlong::kda::step_fused_composed);
}
#endif

TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("kda_step_fused_", furlong::kda::step_fused_meta);
}

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("kda_step_fused_", furlong::kda::step_fused_autograd);
}
