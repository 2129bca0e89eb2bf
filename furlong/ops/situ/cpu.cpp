// Gated activations on CPU tensors: fp32 and bf16 by the elementwise kernels, other dtypes by the reference.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "furlong/base/parallel.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/situ/checks.h"
#include "furlong/ops/situ/elements.h"
#include "furlong/ops/situ/reference.h"

namespace furlong {
namespace {

constexpr int64_t kGrain = 16384;  // elements of one range of a parallel loop

void run(GluKernels::Kernel kernel, const GluElements& glu, int64_t count) {
  parallel_for(0, count, kGrain, [&](int64_t first, int64_t last) { kernel(glu, first, last); });
}

at::Tensor forward(GluKernels::Kernel kernel, GluElements glu, const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor gate_flat = gate.contiguous();
  const at::Tensor up_flat = up.contiguous();
  const at::Tensor y = at::empty_like(gate_flat);
  glu.gate = gate_flat.const_data_ptr();
  glu.up = up_flat.const_data_ptr();
  glu.y = y.mutable_data_ptr();
  run(kernel, glu, y.numel());
  return y;
}

std::tuple<at::Tensor, at::Tensor> backward(GluKernels::Kernel kernel, GluElements glu, const at::Tensor& grad,
                                            const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor gate_flat = gate.contiguous();
  const at::Tensor up_flat = up.contiguous();
  const at::Tensor dy = grad.contiguous();
  const at::Tensor dgate = at::empty_like(gate_flat);
  const at::Tensor dup = at::empty_like(up_flat);
  glu.gate = gate_flat.const_data_ptr();
  glu.up = up_flat.const_data_ptr();
  glu.dy = dy.const_data_ptr();
  glu.dgate = dgate.mutable_data_ptr();
  glu.dup = dup.mutable_data_ptr();
  run(kernel, glu, dy.numel());
  return {dgate, dup};
}

GluElements constants(double beta, std::optional<double> linear_beta) {
  return {.beta = static_cast<float>(beta), .linear_beta = static_cast<float>(linear_beta.value_or(0.0))};
}

at::Tensor situ_glu_cpu(const at::Tensor& gate, const at::Tensor& up, double beta, std::optional<double> linear_beta) {
  check_situ_glu(gate, up, beta, linear_beta);
  if (!has_cpu_kernel(gate)) return situ_glu_reference(gate, up, beta, linear_beta);
  return forward(glu_kernels(is_bf16(gate)).situ, constants(beta, linear_beta), gate, up);
}

at::Tensor swiglu_cpu(const at::Tensor& gate, const at::Tensor& up) {
  check_swiglu(gate, up);
  if (!has_cpu_kernel(gate)) return swiglu_reference(gate, up);
  return forward(glu_kernels(is_bf16(gate)).swiglu, {}, gate, up);
}

std::tuple<at::Tensor, at::Tensor> situ_glu_backward_cpu(const at::Tensor& grad, const at::Tensor& gate,
                                                         const at::Tensor& up, double beta,
                                                         std::optional<double> linear_beta) {
  return backward(glu_kernels(is_bf16(gate)).situ_backward, constants(beta, linear_beta), grad, gate, up);
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward_cpu(const at::Tensor& grad, const at::Tensor& gate,
                                                       const at::Tensor& up) {
  return backward(glu_kernels(is_bf16(gate)).swiglu_backward, {}, grad, gate, up);
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("situ_glu", furlong::situ_glu_cpu);
  m.impl("swiglu", furlong::swiglu_cpu);
  m.impl("_situ_glu_backward", furlong::situ_glu_backward_cpu);
  m.impl("_swiglu_backward", furlong::swiglu_backward_cpu);
}
