// quantile_count_: adds one to the bin of the required bias cutoff_n - score_ne, for every expert and valid token.
//   N tokens   E experts   Q bins
//
// bin = clamp(floor((cutoff - score - low) * Q / (high - low)), 0, Q - 1) in double precision: element by element and
// counted in integers, so that the counts do not depend on the order or the split of the tokens, nor on the device.

#include <ATen/TensorOperators.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/reciprocal.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "furlong/base/parallel.h"
#include "furlong/base/shape.h"

namespace furlong {

namespace {

constexpr int64_t kExpertGrain = 8;

void check(const at::Tensor& counts_EQ, const at::Tensor& scores_NE, const at::Tensor& cutoff_N,
           const at::Tensor& range_2, int64_t num_valid) {
  const char* op = "quantile_count_";
  check_shape(op, "scores_NE", scores_NE, {-1, -1});
  check_dtype(op, "scores_NE", scores_NE, at::kFloat);
  check_shape(op, "counts_EQ", counts_EQ, {scores_NE.size(1), -1});
  check_dtype(op, "counts_EQ", counts_EQ, at::kInt);
  check_argument(counts_EQ.is_contiguous(), op, "counts_EQ: need a contiguous tensor");
  check_shape(op, "cutoff_N", cutoff_N, {scores_NE.size(0)});
  check_dtype(op, "cutoff_N", cutoff_N, at::kFloat);
  check_shape(op, "range_2", range_2, {2});
  check_dtype(op, "range_2", range_2, at::kDouble);
  check_argument(num_valid >= 0 && num_valid <= scores_NE.size(0), op,
                 "num_valid: got " + std::to_string(num_valid) + " of " + std::to_string(scores_NE.size(0)));
}

/// Each thread counts the columns of its own experts, so no two threads share a counter.
at::Tensor& count_cpu(at::Tensor& counts_EQ, const at::Tensor& scores_in, const at::Tensor& cutoff_in,
                      const at::Tensor& range_2, int64_t num_valid) {
  check(counts_EQ, scores_in, cutoff_in, range_2, num_valid);
  const at::Tensor scores_NE = scores_in.contiguous(), cutoff_N = cutoff_in.contiguous();
  const int64_t num_experts = scores_NE.size(1), num_bins = counts_EQ.size(1);
  const double low = range_2.const_data_ptr<double>()[0], high = range_2.const_data_ptr<double>()[1];
  const double bins_per_unit = 1.0 / (high - low) * static_cast<double>(num_bins);
  const double last_bin = static_cast<double>(num_bins - 1);
  const float* scores = scores_NE.const_data_ptr<float>();
  const float* cutoff = cutoff_N.const_data_ptr<float>();
  int32_t* counts = counts_EQ.data_ptr<int32_t>();
  parallel_for(0, num_experts, kExpertGrain, [&](int64_t first, int64_t last) {
    for (int64_t n = 0; n < num_valid; ++n) {
      const double shifted_cutoff = static_cast<double>(cutoff[n]) - low;
      for (int64_t e = first; e < last; ++e) {
        const double bin = (shifted_cutoff - static_cast<double>(scores[n * num_experts + e])) * bins_per_unit;
        if (!std::isfinite(bin)) {
          throw NumericError("[quantile_count_] scores_NE: the score of expert " + std::to_string(e) + " for token " +
                             std::to_string(n) + " is not finite");
        }
        // Truncation is the floor here: the clamp comes first.
        ++counts[e * num_bins + static_cast<int64_t>(std::clamp(bin, 0.0, last_bin))];
      }
    }
  });
  return counts_EQ;
}

at::Tensor& count_reference(at::Tensor& counts_EQ, const at::Tensor& scores_NE, const at::Tensor& cutoff_N,
                            const at::Tensor& range_2, int64_t num_valid) {
  check(counts_EQ, scores_NE, cutoff_N, range_2, num_valid);
  const int64_t num_experts = counts_EQ.size(0), num_bins = counts_EQ.size(1);
  const at::Tensor low = range_2[0], bins_per_unit = at::reciprocal(range_2[1] - low) * num_bins;
  const at::Tensor shifted_cutoff = cutoff_N.narrow(0, 0, num_valid).to(at::kDouble) - low;
  const at::Tensor bin_ME =
      (shifted_cutoff.unsqueeze(1) - scores_NE.narrow(0, 0, num_valid).to(at::kDouble)) * bins_per_unit;
  at::_assert_async(bin_ME.isfinite().all(), "[quantile_count_] scores_NE: a score is not finite");
  const at::Tensor offset_E = at::arange(num_experts, counts_EQ.options().dtype(at::kLong)) * num_bins;
  const at::Tensor index = bin_ME.clamp(0, static_cast<double>(num_bins - 1)).to(at::kLong) + offset_E;
  counts_EQ.view(-1).scatter_add_(0, index.view(-1), at::ones({index.numel()}, counts_EQ.options()));
  return counts_EQ;
}

at::Tensor& count_meta(at::Tensor& counts_EQ, const at::Tensor& scores_NE, const at::Tensor& cutoff_N,
                       const at::Tensor& range_2, int64_t num_valid) {
  check(counts_EQ, scores_NE, cutoff_N, range_2, num_valid);
  return counts_EQ;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def("quantile_count_(Tensor(a!) counts, Tensor scores, Tensor cutoff, Tensor range, int num_valid) -> Tensor(a!)");
  m.def(
      "quantile_count_reference_(Tensor(a!) counts, Tensor scores, Tensor cutoff, Tensor range, int num_valid) "
      "-> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("quantile_count_reference_", count_reference);
}
TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("quantile_count_", count_cpu);
}
TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("quantile_count_", count_reference);
}
TORCH_LIBRARY_IMPL(furlong, Meta, m) {
  m.impl("quantile_count_", count_meta);
}

}  // namespace furlong
