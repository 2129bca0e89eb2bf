#pragma once

// Muon over many parameters at once: blocks of equal shape, of whatever parameters, share a batch.

#include <ATen/core/Tensor.h>

#include <vector>

#include "furlong/optim/optimizer.h"

namespace furlong {

/// One parameter's part in a step. All three tensors are fp32, contiguous and of one shape; the weight is changed in
/// place.
struct MuonParam {
  at::Tensor weight;
  at::Tensor grad;
  at::Tensor momentum;
  int64_t blocks = 1;  // equal row blocks, each orthogonalised on its own
  bool weight_decay = true;
};

void muon_step(const std::vector<MuonParam>& params, const MuonConfig& config, double lr);

/// The same in plain tensor operations on any device: the oracle of the CPU kernels.
void muon_step_reference(const std::vector<MuonParam>& params, const MuonConfig& config, double lr);

}  // namespace furlong
