// Gradients of short_conv; the step form has none and says so.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/short_conv/internal.h"

namespace furlong::short_conv_detail {

namespace {

at::Tensor step_autograd(const at::Tensor& x_BP, const at::Tensor& weight_PW, at::Tensor tail_STP,
                         const at::Tensor& slots_B) {
  if (at::GradMode::is_enabled()) {
    for (const at::Tensor& input : {x_BP, weight_PW, tail_STP}) {
      check_argument(!input.requires_grad(), "short_conv_step_",
                     "got an input that requires a gradient: the step updates its tail in place; use short_conv");
    }
  }
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, at::Tensor, const at::Tensor&);
  static const auto op = find_op<Signature>("furlong::short_conv_step_");
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x_BP, weight_PW, tail_STP, slots_B);
}

}  // namespace

}  // namespace furlong::short_conv_detail

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("short_conv", furlong::short_conv_detail::reference);
  m.impl("short_conv_step_", furlong::short_conv_detail::step_autograd);
}

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("short_conv", furlong::short_conv_detail::reference);
  m.impl("short_conv_step_", furlong::short_conv_detail::step_reference);
}
