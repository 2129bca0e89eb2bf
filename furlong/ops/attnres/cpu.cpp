// The read on CPU tensors: fp32 and bf16 by the per-token kernels, other dtypes by the reference.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "furlong/base/parallel.h"
#include "furlong/ops/attnres/checks.h"
#include "furlong/ops/attnres/reference.h"
#include "furlong/ops/attnres/rows.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/common/partial_sums.h"

namespace furlong {
namespace {

/// Contiguous sources and the kernel's view of them; lives as long as the call.
struct Sources {
  explicit Sources(at::TensorList sources_ND) {
    for (const at::Tensor& source : sources_ND) {
      tensors.push_back(source.contiguous());
      data.push_back(tensors.back().const_data_ptr());
    }
  }
  std::vector<at::Tensor> tensors;
  std::vector<const void*> data;
};

AttnResRows rows_of(const Sources& sources, const at::Tensor& w, double eps) {
  return {.size = w.size(0),
          .sources = static_cast<int64_t>(sources.data.size()),
          .eps = static_cast<float>(eps),
          .source = sources.data.data(),
          .w = w.const_data_ptr<float>()};
}

std::tuple<at::Tensor, at::Tensor> attnres_read_cpu(at::TensorList sources_ND, const at::Tensor& w_D, double eps) {
  check_attnres_read(sources_ND, w_D);
  const at::Tensor& first_source = sources_ND[0];
  if (!has_cpu_kernel(first_source)) return attnres_read_reference(sources_ND, w_D, eps);
  const Sources sources(sources_ND);
  const at::Tensor w = w_D.to(at::kFloat).contiguous();
  const at::Tensor out_ND = at::empty_like(sources.tensors[0]);
  const at::Tensor p_NS =
      at::empty({first_source.size(0), static_cast<int64_t>(sources_ND.size())}, w.options().dtype(at::kFloat));
  AttnResRows rows = rows_of(sources, w, eps);
  rows.out = out_ND.mutable_data_ptr();
  rows.p = p_NS.mutable_data_ptr<float>();
  const auto kernel = attnres_kernels(is_bf16(first_source)).read;
  constexpr int64_t kGrainTokens = 16;
  parallel_for(0, out_ND.size(0), kGrainTokens, [&](int64_t first, int64_t last) { kernel(rows, first, last); });
  return {out_ND, p_NS};
}

std::tuple<std::vector<at::Tensor>, at::Tensor> attnres_read_backward_cpu(const at::Tensor& grad_ND,
                                                                          at::TensorList sources_ND,
                                                                          const at::Tensor& w_D, double eps) {
  const Sources sources(sources_ND);
  const at::Tensor w = w_D.to(at::kFloat).contiguous();
  const at::Tensor dout_ND = grad_ND.contiguous();
  std::vector<at::Tensor> dsources_ND;
  std::vector<void*> dsource_data;
  for (const at::Tensor& source : sources.tensors) {
    dsources_ND.push_back(at::empty_like(source));
    dsource_data.push_back(dsources_ND.back().mutable_data_ptr());
  }
  AttnResRows rows = rows_of(sources, w, eps);
  rows.dout = dout_ND.const_data_ptr();
  rows.dsource = dsource_data.data();
  const auto kernel = attnres_kernels(is_bf16(grad_ND)).read_backward;
  const at::Tensor dw_D = sum_over_rows(
      dout_ND.size(0), rows.size, [&](int64_t first, int64_t last, float* sums) { kernel(rows, first, last, sums); });
  return {std::move(dsources_ND), dw_D.to(w_D.scalar_type())};
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("attnres_read", furlong::attnres_read_cpu);
  m.impl("_attnres_read_backward", furlong::attnres_read_backward_cpu);
}
