// Gradients of kda_chunk; the step form has none and says so.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/kda/internal.h"

namespace furlong::kda {

namespace {

at::Tensor step_autograd(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                         const at::Tensor& decay_log_BHK, const at::Tensor& beta_BH, at::Tensor state_SHKV,
                         const at::Tensor& slots_B, double scale) {
  if (at::GradMode::is_enabled()) {
    for (const at::Tensor& input : {q_BHK, k_BHK, v_BHV, decay_log_BHK, beta_BH, state_SHKV}) {
      check_argument(!input.requires_grad(), "kda_step_",
                     "got an input that requires a gradient: the step updates its state in place; use kda_chunk");
    }
  }
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, at::Tensor, const at::Tensor&, double);
  static const auto op = find_op<Signature>("furlong::kda_step_");
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(q_BHK, k_BHK, v_BHV, decay_log_BHK, beta_BH, state_SHKV, slots_B, scale);
}

}  // namespace

}  // namespace furlong::kda

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("kda_chunk", furlong::kda::reference);
  m.impl("kda_step_", furlong::kda::step_autograd);
}

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("kda_chunk", furlong::kda::reference);
  m.impl("kda_step_", furlong::kda::step_reference);
}

TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("kda_chunk", furlong::kda::reference);
}
