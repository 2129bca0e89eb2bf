#pragma once

// Shared by the files of this folder.
//   N packed tokens   B sequences   S state slots   P channels   W kernel width   T = W - 1 tail columns

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace furlong::short_conv_detail {

constexpr int64_t kMaxCudaKernelWidth = 16;  // wider kernels run the reference on CUDA tensors

void check_arguments(const char* op, const at::Tensor& x_NP, const at::Tensor& weight_PW, const at::Tensor& offsets,
                     const at::Tensor& offsets_host, const std::optional<at::Tensor>& initial_tail_BTP);

/// The convolution in tensor operations, differentiable by autograd.
std::tuple<at::Tensor, at::Tensor> reference(const at::Tensor& x_NP, const at::Tensor& weight_PW,
                                             const at::Tensor& offsets, const at::Tensor& offsets_host,
                                             const std::optional<at::Tensor>& initial_tail_BTP);

at::Tensor step_reference(const at::Tensor& x_BP, const at::Tensor& weight_PW, at::Tensor tail_STP,
                          const at::Tensor& slots_B);

}  // namespace furlong::short_conv_detail
