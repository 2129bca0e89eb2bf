#pragma once

// What the layers report of one optimizer step: loads are summed and shares averaged over its micro-batches on the
// data's device, and brought to the host together, with one synchronisation.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "furlong/model/decoder.h"

namespace furlong {

/// Empty vectors and unset values: the layer has no such mechanism.
struct LayerStatistics {
  std::vector<double> load;  // tokens sent to each expert
  std::optional<double> decay_saturated, decay_open, beta_mean;
  std::vector<double> attention_depth_weight, mlp_depth_weight;
};

/// MaxVio, and standard deviation / mean, of a load vector; 0 for a vector without tokens.
double max_violation_of(const std::vector<double>& load);
double variation_of(const std::vector<double>& load);

class StepStatistics {
 public:
  void add(const ForwardRecord& record, int64_t num_tokens);
  /// Brings the sums to the host. Nothing may be added afterwards.
  void finish();

  const std::vector<LayerStatistics>& layers() const { return layers_; }
  const std::vector<double>& output_depth_weight() const { return output_depth_weight_; }

 private:
  struct Sums {
    at::Tensor load, decay_saturated, decay_open, beta_mean, attention_depth, mlp_depth;
  };
  std::vector<Sums> sums_;
  at::Tensor output_depth_;
  int64_t num_tokens_ = 0;
  std::vector<LayerStatistics> layers_;
  std::vector<double> output_depth_weight_;
};

}  // namespace furlong
