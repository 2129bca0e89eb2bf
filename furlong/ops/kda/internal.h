#pragma once

// Shared by the files of this folder: argument checks and the tensor-operation forms that back every device.
//   N packed tokens   B sequences   S state slots   H heads   K key size   V value size

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace furlong::kda {

/// Shapes, dtypes and offsets of kda_chunk and kda_reference.
void check_arguments(const char* op, const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                     const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH, const at::Tensor& offsets,
                     const at::Tensor& offsets_host, const std::optional<at::Tensor>& initial_state_BHKV);

/// The recurrence token by token; differentiable by autograd.
std::tuple<at::Tensor, at::Tensor> reference(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                                             const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH,
                                             const at::Tensor& offsets, const at::Tensor& offsets_host,
                                             const std::optional<at::Tensor>& initial_state_BHKV, double scale);

/// One step of the recurrence on the given slots of the pool.
at::Tensor step_reference(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                          const at::Tensor& decay_log_BHK, const at::Tensor& beta_BH, at::Tensor state_SHKV,
                          const at::Tensor& slots_B, double scale);

/// The gates in tensor operations; differentiable by autograd.
at::Tensor gate_bounded_reference(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK,
                                  double lower_bound);
at::Tensor gate_softplus_reference(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK);

}  // namespace furlong::kda
