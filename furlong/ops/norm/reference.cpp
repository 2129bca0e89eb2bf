#include "furlong/ops/norm/reference.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"

namespace furlong {

at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight_D, double eps) {
  const at::Tensor x_wide = x.to(arithmetic_type(x));
  const at::Tensor normalised = x_wide * (x_wide * x_wide).mean(-1, /*keepdim=*/true).add(eps).rsqrt();
  return normalised.to(x.scalar_type()) * weight_D.to(x.scalar_type());
}

at::Tensor gated_rms_norm_reference(const at::Tensor& x, const at::Tensor& weight_V, const at::Tensor& gate,
                                    double eps) {
  const at::ScalarType wide = arithmetic_type(x);
  const at::Tensor x_wide = x.to(wide);
  const at::Tensor normalised = x_wide * (x_wide * x_wide).mean(-1, /*keepdim=*/true).add(eps).rsqrt();
  return (normalised * weight_V.to(wide) * gate.to(wide).sigmoid()).to(x.scalar_type());
}

at::Tensor l2_norm_reference(const at::Tensor& x, double eps) {
  const at::Tensor x_wide = x.to(arithmetic_type(x));
  return (x_wide * (x_wide * x_wide).sum(-1, /*keepdim=*/true).add(eps).rsqrt()).to(x.scalar_type());
}

}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("rms_norm_reference", furlong::rms_norm_reference);
  m.impl("gated_rms_norm_reference", furlong::gated_rms_norm_reference);
  m.impl("l2_norm_reference", furlong::l2_norm_reference);
}
