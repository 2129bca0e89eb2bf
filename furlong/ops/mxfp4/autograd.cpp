// Gradients of the MXFP4 operators: straight through the fake quantisations; the grouped product differentiates
// through the reference in x (packed weights have no gradient).

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/mxfp4/mxfp4.h"
#include "furlong/ops/mxfp4/reference.h"

namespace furlong {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct FakeQuantizeFunction : torch::autograd::Function<FakeQuantizeFunction> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x, Mxfp4Scale rule) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return mxfp4_fake_quantize(x, rule);
  }

  static variable_list backward(AutogradContext*, const variable_list& grads) { return {grads[0], at::Tensor()}; }
};

struct Mxfp8FakeQuantizeFunction : torch::autograd::Function<Mxfp8FakeQuantizeFunction> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return mxfp8_fake_quantize(x);
  }

  static variable_list backward(AutogradContext*, const variable_list& grads) { return {grads[0]}; }
};

at::Tensor fake_quantize_autograd(const at::Tensor& x, c10::string_view rule) {
  return FakeQuantizeFunction::apply(x, mxfp4_scale_rule(std::string(rule)));
}

at::Tensor mxfp8_fake_quantize_autograd(const at::Tensor& x) {
  return Mxfp8FakeQuantizeFunction::apply(x);
}

at::Tensor grouped_linear_autograd(const at::Tensor& x_PI, at::TensorList packed, at::TensorList scale,
                                   const at::Tensor& offsets) {
  if (needs_gradient(x_PI)) return mxfp4_grouped_linear_reference(x_PI, packed, scale, offsets);
  const at::AutoDispatchBelowADInplaceOrView below;
  return mxfp4_grouped_linear(x_PI, packed, scale, offsets);
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("mxfp4_fake_quantize", furlong::fake_quantize_autograd);
  m.impl("mxfp8_fake_quantize", furlong::mxfp8_fake_quantize_autograd);
  m.impl("mxfp4_grouped_linear", furlong::grouped_linear_autograd);
}
