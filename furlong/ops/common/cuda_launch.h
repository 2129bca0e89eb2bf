#pragma once

// What the CUDA glue of several operators shares. Included by *_glue.cpp files only: needs a CUDA wheel's headers.

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <string>

#include "furlong/base/error.h"
#include "furlong/base/shape.h"

namespace furlong {

/// Throws what a launcher returned.
inline void check_launch(const char* op, int error) {
  if (error == cudaSuccess) return;
  throw Error(std::string("[") + op + "] CUDA: " + cudaGetErrorString(static_cast<cudaError_t>(error)), 1);
}

/// Views of wider rows are read in place as long as the last dimension's elements are adjacent.
inline at::Tensor with_adjacent_columns(const at::Tensor& x) {
  return x.size(-1) <= 1 || x.stride(-1) == 1 ? x : x.contiguous();
}

inline void check_same_device(const char* op, const char* name, const at::Tensor& x, const at::Tensor& like) {
  check_argument(x.device() == like.device(), op,
                 std::string(name) + ": got device " + x.device().str() + ", need " + like.device().str());
}

}  // namespace furlong
