// Norms on CPU tensors: fp32 and bf16 by the row kernels, other dtypes by the reference.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "furlong/base/parallel.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/common/partial_sums.h"
#include "furlong/ops/norm/checks.h"
#include "furlong/ops/norm/reference.h"
#include "furlong/ops/norm/rows.h"

namespace furlong {
namespace {

// Rows of one range of a parallel loop: about 64 KiB, below which starting a thread costs more than it saves.
int64_t grain_of(int64_t size) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(size, 1));
}

int64_t rows_of(const at::Tensor& x) {
  return x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
}

// As RMSNorm applies it: in x's dtype, so that fp32 masters give what the stored weights will give.
at::Tensor rounded_weight(const at::Tensor& weight, const at::Tensor& x) {
  return weight.to(x.scalar_type()).to(at::kFloat).contiguous();
}

at::Tensor run_forward(NormKernels::Forward kernel, NormRows norm, const at::Tensor& x) {
  const at::Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  norm.x = x.const_data_ptr();
  norm.y = y.mutable_data_ptr();
  parallel_for(0, rows_of(x), grain_of(norm.size), [&](int64_t first, int64_t last) { kernel(norm, first, last); });
  return y;
}

NormRows rows_with(const at::Tensor& x, double eps) {
  return {.size = x.size(-1), .eps = static_cast<float>(eps)};
}

at::Tensor rms_norm_cpu(const at::Tensor& x, const at::Tensor& weight_D, double eps) {
  check_rms_norm(x, weight_D);
  if (!has_cpu_kernel(x)) return rms_norm_reference(x, weight_D, eps);
  const at::Tensor weight = rounded_weight(weight_D, x);
  NormRows norm = rows_with(x, eps);
  norm.weight = weight.const_data_ptr<float>();
  return run_forward(norm_kernels(is_bf16(x)).rms_norm, norm, x.contiguous());
}

at::Tensor gated_rms_norm_cpu(const at::Tensor& x, const at::Tensor& weight_V, const at::Tensor& gate, double eps) {
  check_gated_rms_norm(x, weight_V, gate);
  if (!has_cpu_kernel(x)) return gated_rms_norm_reference(x, weight_V, gate, eps);
  const at::Tensor weight = weight_V.to(at::kFloat).contiguous();
  const at::Tensor gate_rows = gate.contiguous();
  NormRows norm = rows_with(x, eps);
  norm.weight = weight.const_data_ptr<float>();
  norm.gate = gate_rows.const_data_ptr();
  return run_forward(norm_kernels(is_bf16(x)).gated_rms_norm, norm, x.contiguous());
}

at::Tensor l2_norm_cpu(const at::Tensor& x, double eps) {
  check_l2_norm(x);
  if (!has_cpu_kernel(x)) return l2_norm_reference(x, eps);
  return run_forward(norm_kernels(is_bf16(x)).l2_norm, rows_with(x, eps), x.contiguous());
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward_cpu(const at::Tensor& grad, const at::Tensor& x,
                                                         const at::Tensor& weight_D, double eps) {
  const at::Tensor x_rows = x.contiguous();
  const at::Tensor dy = grad.contiguous();
  const at::Tensor weight = rounded_weight(weight_D, x);
  const at::Tensor dx = at::empty_like(x_rows);
  NormRows norm = rows_with(x, eps);
  norm.x = x_rows.const_data_ptr();
  norm.weight = weight.const_data_ptr<float>();
  norm.dy = dy.const_data_ptr();
  norm.dx = dx.mutable_data_ptr();
  const auto kernel = norm_kernels(is_bf16(x)).rms_norm_backward;
  const at::Tensor dweight = sum_over_rows(
      rows_of(x), norm.size, [&](int64_t first, int64_t last, float* sums) { kernel(norm, first, last, sums); });
  return {dx, dweight.to(weight_D.scalar_type())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_rms_norm_backward_cpu(const at::Tensor& grad, const at::Tensor& x,
                                                                           const at::Tensor& weight_V,
                                                                           const at::Tensor& gate, double eps) {
  const at::Tensor x_rows = x.contiguous();
  const at::Tensor gate_rows = gate.contiguous();
  const at::Tensor dy = grad.contiguous();
  const at::Tensor weight = weight_V.to(at::kFloat).contiguous();
  const at::Tensor dx = at::empty_like(x_rows);
  const at::Tensor dgate = at::empty_like(gate_rows);
  NormRows norm = rows_with(x, eps);
  norm.x = x_rows.const_data_ptr();
  norm.weight = weight.const_data_ptr<float>();
  norm.gate = gate_rows.const_data_ptr();
  norm.dy = dy.const_data_ptr();
  norm.dx = dx.mutable_data_ptr();
  norm.dgate = dgate.mutable_data_ptr();
  const auto kernel = norm_kernels(is_bf16(x)).gated_rms_norm_backward;
  const at::Tensor dweight = sum_over_rows(
      rows_of(x), norm.size, [&](int64_t first, int64_t last, float* sums) { kernel(norm, first, last, sums); });
  return {dx, dweight.to(weight_V.scalar_type()), dgate};
}

at::Tensor l2_norm_backward_cpu(const at::Tensor& grad, const at::Tensor& x, double eps) {
  const at::Tensor x_rows = x.contiguous();
  const at::Tensor dy = grad.contiguous();
  const at::Tensor dx = at::empty_like(x_rows);
  NormRows norm = rows_with(x, eps);
  norm.x = x_rows.const_data_ptr();
  norm.dy = dy.const_data_ptr();
  norm.dx = dx.mutable_data_ptr();
  const auto kernel = norm_kernels(is_bf16(x)).l2_norm_backward;
  parallel_for(0, rows_of(x), grain_of(norm.size),
               [&](int64_t first, int64_t last) { kernel(norm, first, last, nullptr); });
  return dx;
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("rms_norm", furlong::rms_norm_cpu);
  m.impl("gated_rms_norm", furlong::gated_rms_norm_cpu);
  m.impl("l2_norm", furlong::l2_norm_cpu);
  m.impl("_rms_norm_backward", furlong::rms_norm_backward_cpu);
  m.impl("_gated_rms_norm_backward", furlong::gated_rms_norm_backward_cpu);
  m.impl("_l2_norm_backward", furlong::l2_norm_backward_cpu);
}
