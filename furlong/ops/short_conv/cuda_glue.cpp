// short_conv on CUDA tensors: from tensors to the launchers' arguments.
//   N packed tokens   B sequences   S state slots   P channels   W kernel width   T = W - 1 tail columns

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "furlong/ops/common/cuda_launch.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/short_conv/cuda_conv.h"
#include "furlong/ops/short_conv/internal.h"

namespace furlong::short_conv_detail {

namespace {

static_assert(kMaxCudaWidth == kMaxCudaKernelWidth);

bool has_cuda_kernel(const at::Tensor& x, const at::Tensor& weight_PW) {
  return has_kernel(x) && weight_PW.size(1) <= kMaxCudaWidth;
}

ConvShape shape_of(const at::Tensor& x, const at::Tensor& weight_PW, const at::Tensor& offsets) {
  return {x.size(0),  offsets.numel() - 1,
          x.size(1),  static_cast<int>(weight_PW.size(1)),
          is_bf16(x), offsets.const_data_ptr<int64_t>()};
}

std::tuple<at::Tensor, at::Tensor> conv_cuda(const at::Tensor& x_NP, const at::Tensor& weight_PW,
                                             const at::Tensor& offsets, const at::Tensor& offsets_host,
                                             const std::optional<at::Tensor>& initial_tail_BTP) {
  check_arguments("short_conv", x_NP, weight_PW, offsets, offsets_host, initial_tail_BTP);
  if (!has_cuda_kernel(x_NP, weight_PW)) return reference(x_NP, weight_PW, offsets, offsets_host, initial_tail_BTP);
  const c10::cuda::CUDAGuard guard(x_NP.device());
  const at::Tensor x = with_adjacent_columns(x_NP), weight = weight_PW.contiguous(), starts = offsets.contiguous();
  const at::Tensor tail = initial_tail_BTP.has_value() ? initial_tail_BTP->contiguous() : at::Tensor();
  check_same_device("short_conv", "weight_PW", weight, x);
  check_same_device("short_conv", "offsets", starts, x);
  if (tail.defined()) check_same_device("short_conv", "initial_tail_BTP", tail, x);
  const at::Tensor y = at::empty(x.sizes(), x.options());
  const at::Tensor final_tail = at::empty({starts.numel() - 1, weight.size(1) - 1, x.size(1)}, x.options());
  const ConvForwardLaunch launch{shape_of(x, weight, starts),
                                 x.const_data_ptr(),
                                 x.stride(0),
                                 weight.const_data_ptr<float>(),
                                 tail.defined() ? tail.const_data_ptr() : nullptr,
                                 y.mutable_data_ptr(),
                                 final_tail.mutable_data_ptr()};
  check_launch("short_conv", launch_conv_forward(launch, c10::cuda::getCurrentCUDAStream()));
  return {y, final_tail};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_cuda(const at::Tensor& d_y_NP,
                                                             const std::optional<at::Tensor>& d_final_tail_BTP,
                                                             const at::Tensor& x_NP, const at::Tensor& weight_PW,
                                                             const at::Tensor& offsets_host,
                                                             const std::optional<at::Tensor>& initial_tail_BTP) {
  const c10::cuda::CUDAGuard guard(x_NP.device());
  const at::Tensor x = with_adjacent_columns(x_NP), d_y = with_adjacent_columns(d_y_NP);
  const at::Tensor weight = weight_PW.contiguous();
  const at::Tensor starts = offsets_host.to(x.device(), at::kLong, /*non_blocking=*/true);
  const at::Tensor tail = initial_tail_BTP.has_value() ? initial_tail_BTP->contiguous() : at::Tensor();
  const at::Tensor d_final = d_final_tail_BTP.has_value() ? d_final_tail_BTP->contiguous() : at::Tensor();
  const at::Tensor d_x = at::empty(x.sizes(), x.options());
  const at::Tensor d_weight = at::empty(weight.sizes(), weight.options());
  // The tail of an empty sequence passes through: its gradient too.
  const at::Tensor d_tail =
      d_final.defined() ? d_final.clone() : at::zeros({starts.numel() - 1, weight.size(1) - 1, x.size(1)}, x.options());
  const ConvShape shape = shape_of(x, weight, starts);
  const at::Tensor workspace = at::empty({conv_backward_workspace(shape)}, weight.options());
  const ConvBackwardLaunch launch{shape,
                                  x.const_data_ptr(),
                                  x.stride(0),
                                  d_y.const_data_ptr(),
                                  d_y.stride(0),
                                  weight.const_data_ptr<float>(),
                                  tail.defined() ? tail.const_data_ptr() : nullptr,
                                  d_final.defined() ? d_final.const_data_ptr() : nullptr,
                                  d_x.mutable_data_ptr(),
                                  d_tail.mutable_data_ptr(),
                                  d_weight.mutable_data_ptr<float>(),
                                  workspace.mutable_data_ptr<float>()};
  check_launch("_short_conv_backward", launch_conv_backward(launch, c10::cuda::getCurrentCUDAStream()));
  return {d_x, d_weight, d_tail};
}

at::Tensor step_cuda(const at::Tensor& x_BP, const at::Tensor& weight_PW, at::Tensor tail_STP,
                     const at::Tensor& slots_B) {
  if (!has_cuda_kernel(x_BP, weight_PW) || (tail_STP.size(2) > 1 && tail_STP.stride(2) != 1)) {
    return step_reference(x_BP, weight_PW, tail_STP, slots_B);
  }
  const c10::cuda::CUDAGuard guard(x_BP.device());
  const at::Tensor x = with_adjacent_columns(x_BP), weight = weight_PW.contiguous(), slots = slots_B.contiguous();
  check_same_device("short_conv_step_", "weight_PW", weight, x);
  check_same_device("short_conv_step_", "tail_STP", tail_STP, x);
  check_same_device("short_conv_step_", "slots_B", slots, x);
  const at::Tensor y = at::empty(x.sizes(), x.options());
  const ConvStepLaunch launch{{x.size(0), x.size(0), x.size(1), static_cast<int>(weight.size(1)), is_bf16(x), nullptr},
                              x.const_data_ptr(),
                              x.stride(0),
                              weight.const_data_ptr<float>(),
                              tail_STP.mutable_data_ptr(),
                              tail_STP.size(0),
                              tail_STP.stride(0),
                              tail_STP.stride(1),
                              slots.const_data_ptr<int64_t>(),
                              y.mutable_data_ptr()};
  check_launch("short_conv_step_", launch_conv_step(launch, c10::cuda::getCurrentCUDAStream()));
  return y;
}

}  // namespace

}  // namespace furlong::short_conv_detail

TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("short_conv", furlong::short_conv_detail::conv_cuda);
  m.impl("_short_conv_backward", furlong::short_conv_detail::backward_cuda);
  m.impl("short_conv_step_", furlong::short_conv_detail::step_cuda);
}
