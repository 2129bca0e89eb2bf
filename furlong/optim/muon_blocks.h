#pragma once

// The passes of a Muon step around Newton-Schulz, over runs of neighbouring blocks of one parameter.

#include <ATen/core/Tensor.h>

#include "furlong/optim/muon.h"

namespace furlong {

/// `count` blocks of one parameter, from block `first`; blocks are [rows, cols].
struct MuonRun {
  const MuonParam* param;
  int64_t first;
  int64_t count;
  int64_t rows;
  int64_t cols;

  /// The run's blocks of one of the parameter's tensors, [count, rows, cols].
  at::Tensor of(const at::Tensor& tensor) const { return tensor.view({-1, rows, cols}).narrow(0, first, count); }
  bool transposed() const { return rows > cols; }
};

/// Updates the run's momentum and writes the normalised direction to x_BRC (rows <= cols; its dtype is that of the
/// products).
void muon_gather_reference(const MuonRun& run, const MuonConfig& config, const at::Tensor& x_BRC);
void muon_gather_cpu(const MuonRun& run, const MuonConfig& config, const at::Tensor& x_BRC);

/// weight <- keep * weight - rate * o.
void muon_scatter_reference(const MuonRun& run, const at::Tensor& o_BRC, double keep, double rate);
void muon_scatter_cpu(const MuonRun& run, const at::Tensor& o_BRC, double keep, double rate);

}  // namespace furlong
