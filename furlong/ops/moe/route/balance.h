#pragma once

// Quantile balancing: the bias of each expert is set, once per optimizer step, to the value that would have given it
// its fair share of the step's tokens. Integer histograms make the result bit-identical for any split into
// micro-batches or ranks.
//   N tokens   E experts   A chosen   Q bins

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace furlong {

class QuantileBalancer {
 public:
  /// `num_bins` bins between min(bias) - 1 and max(bias) + 1.
  QuantileBalancer(int64_t num_experts, int64_t num_chosen, int64_t num_bins = 1000);

  /// Counts the required bias cutoff_i - score_ij of the first num_valid tokens. The bins are fixed by `bias_E` at the
  /// first call after an update. Throws NumericError on non-finite scores.
  void observe(const at::Tensor& scores_NE, const at::Tensor& cutoff_N, const at::Tensor& bias_E, int64_t num_valid);
  /// Replaces `bias_E` by the A/E-quantile of the counts, re-centred to mean zero, and clears the counts. Leaves it
  /// alone (returns false) when there is nothing to balance: A >= E or fewer than two tokens.
  bool update(at::Tensor& bias_E);
  /// Forgets the counts (a skipped step keeps the bias).
  void discard();

  const at::Tensor& counts_EQ() const { return counts_EQ_; }  // int32
  int64_t num_tokens() const { return num_tokens_; }
  /// Largest share of a quantile's target rank that lies in the one bin containing it, at the last update: above about
  /// 0.1 the bins are too coarse.
  double last_bin_mass() const { return last_bin_mass_; }

 private:
  int64_t num_experts_, num_chosen_, num_bins_;
  at::Tensor counts_EQ_;
  at::Tensor range_2_;  // fp64 [low, high] of this step's bins, on the scores' device; undefined between steps
  int64_t num_tokens_ = 0;
  double last_bin_mass_ = 0.0;
};

/// MaxVio of a load vector: max_j load_j / mean - 1.
double max_violation(const at::Tensor& load_E);

}  // namespace furlong
