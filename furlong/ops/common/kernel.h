#pragma once

// Small questions that the glue between a schema and its kernels asks again and again.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

namespace furlong {

/// The dtype in which an op computes on `tensor`: fp64 for fp64, fp32 for everything narrower.
inline at::ScalarType arithmetic_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Our SIMD kernels read fp32 and bf16 on the CPU; everything else runs the reference.
inline bool has_cpu_kernel(const at::Tensor& tensor) {
  return tensor.is_cpu() && (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16);
}

/// Whether this build holds our CUDA kernels; without them CUDA tensors run the references.
#ifdef FURLONG_CUDA
inline constexpr bool kCudaKernels = true;
#else
inline constexpr bool kCudaKernels = false;
#endif

/// A kernel of ours, or its shape-only form, takes this tensor: ops with private forward and backward ops use them.
inline bool has_kernel(const at::Tensor& tensor) {
  const bool dtype = tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16;
  return dtype && (tensor.is_cpu() || tensor.is_meta() || (kCudaKernels && tensor.is_cuda()));
}

inline bool is_bf16(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16;
}

template <typename... Tensors>
bool needs_gradient(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (tensors.requires_grad() || ...);
}

/// The typed handle of an operator without overloads, e.g. find_op<decltype(rms_norm)>("furlong::rms_norm").
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace furlong
