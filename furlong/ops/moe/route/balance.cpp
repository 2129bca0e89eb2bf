#include "furlong/ops/moe/route/balance.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"

namespace furlong {

namespace {

using CountSignature = at::Tensor&(at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t);

void count_margins(at::Tensor& counts_EQ, const at::Tensor& scores_NE, const at::Tensor& cutoff_N,
                   const at::Tensor& range_2, int64_t num_valid) {
  static const auto op = find_op<CountSignature>("furlong::quantile_count_");
  op.call(counts_EQ, scores_NE, cutoff_N, range_2, num_valid);
}

struct Quantile {
  double value = 0.0;     // in bins from the low end
  double bin_mass = 0.0;  // share of the target rank that lies in the bin of the quantile
};

/// Place of the rank-th smallest of the counted values, interpolated inside its bin.
Quantile find_quantile(const int32_t* counts_Q, int64_t num_bins, double rank) {
  const double target = std::ceil(rank);
  int64_t before = 0, bin = 0;
  while (bin + 1 < num_bins && static_cast<double>(before + counts_Q[bin]) < target) before += counts_Q[bin++];
  const double in_bin = counts_Q[bin];
  const double fraction = in_bin > 0 ? std::clamp((rank - static_cast<double>(before)) / in_bin, 0.0, 1.0) : 0.0;
  return {static_cast<double>(bin) + fraction, in_bin / rank};
}

}  // namespace

QuantileBalancer::QuantileBalancer(int64_t num_experts, int64_t num_chosen, int64_t num_bins)
    : num_experts_(num_experts), num_chosen_(num_chosen), num_bins_(num_bins) {
  check_argument(num_experts >= 1 && num_chosen >= 1 && num_bins >= 1, "QuantileBalancer",
                 "experts, chosen and bins must be positive");
}

void QuantileBalancer::observe(const at::Tensor& scores_NE, const at::Tensor& cutoff_N, const at::Tensor& bias_E,
                               int64_t num_valid) {
  check_shape("QuantileBalancer", "scores_NE", scores_NE, {-1, num_experts_});
  check_shape("QuantileBalancer", "bias_E", bias_E, {num_experts_});
  check_argument(
      num_valid >= 0 && num_valid <= scores_NE.size(0), "QuantileBalancer",
      "num_valid: got " + std::to_string(num_valid) + " of " + std::to_string(scores_NE.size(0)) + " tokens");
  if (!counts_EQ_.defined()) {
    counts_EQ_ = at::zeros({num_experts_, num_bins_}, scores_NE.options().dtype(at::kInt).requires_grad(false));
  }
  if (!range_2_.defined()) {
    // s lies in (0, 1) and the cutoff in (min b, 1 + max b), so every required bias falls inside.
    const at::Tensor bias = bias_E.detach().to(at::kDouble);
    range_2_ = at::stack({bias.min() - 1.0, bias.max() + 1.0});
  }
  count_margins(counts_EQ_, scores_NE.detach(), cutoff_N.detach(), range_2_, num_valid);
  num_tokens_ += num_valid;
}

bool QuantileBalancer::update(at::Tensor& bias_E) {
  check_shape("QuantileBalancer", "bias_E", bias_E, {num_experts_});
  if (num_chosen_ >= num_experts_ || num_tokens_ < 2) {
    discard();
    return false;
  }
  const at::Tensor counts = counts_EQ_.cpu(), range = range_2_.cpu();
  const double low = range.const_data_ptr<double>()[0], high = range.const_data_ptr<double>()[1];
  const double bin_width = (high - low) / static_cast<double>(num_bins_);
  const auto tokens = static_cast<double>(num_tokens_);
  const double rank =
      std::min(tokens * static_cast<double>(num_chosen_) / static_cast<double>(num_experts_), tokens - 1);
  std::vector<double> bias(num_experts_);
  double mean = 0.0;
  last_bin_mass_ = 0.0;
  for (int64_t e = 0; e < num_experts_; ++e) {
    const Quantile quantile = find_quantile(counts.const_data_ptr<int32_t>() + e * num_bins_, num_bins_, rank);
    bias[e] = low + quantile.value * bin_width;
    mean += bias[e] / static_cast<double>(num_experts_);
    last_bin_mass_ = std::max(last_bin_mass_, quantile.bin_mass);
  }
  at::Tensor updated = at::zeros({num_experts_}, at::kDouble);
  for (int64_t e = 0; e < num_experts_; ++e) updated.data_ptr<double>()[e] = bias[e] - mean;
  const at::NoGradGuard no_grad;
  bias_E.copy_(updated);
  discard();
  return true;
}

void QuantileBalancer::discard() {
  if (counts_EQ_.defined()) counts_EQ_.zero_();
  range_2_ = at::Tensor();
  num_tokens_ = 0;
}

double max_violation(const at::Tensor& load_E) {
  const at::Tensor load = load_E.detach().to(at::kDouble);
  const double mean = load.mean().item<double>();
  return mean > 0.0 ? load.max().item<double>() / mean - 1.0 : 0.0;
}

}  // namespace furlong
