#include "furlong/infer/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "furlong/base/rng.h"
#include "furlong/base/shape.h"

namespace furlong {

void SamplingOptions::validate() const {
  if (!(std::isfinite(temperature) && temperature >= 0.0 && temperature <= 100.0)) {
    throw UsageError(fmt::format("temperature: got {}, need 0 to 100", temperature));
  }
  if (!(top_p > 0.0 && top_p <= 1.0)) throw UsageError(fmt::format("top-p: got {}, need above 0 and up to 1", top_p));
}

namespace {

/// Probabilities in fp64: the running sum of top-p over a large vocabulary must not lose its tail.
std::vector<double> softmax(const float* logits, int64_t size, double temperature) {
  const double highest = *std::max_element(logits, logits + size);
  std::vector<double> p(size);
  for (int64_t i = 0; i < size; ++i) p[i] = std::exp((logits[i] - highest) / temperature);
  const double total = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& value : p) value /= total;
  return p;
}

}  // namespace

Sample sample_token(const at::Tensor& logits_V, const SamplingOptions& options, uint64_t index) {
  check_shape("sample_token", "logits_V", logits_V, {-1});
  check_dtype("sample_token", "logits_V", logits_V, at::kFloat);
  const at::Tensor host_V = logits_V.cpu().contiguous();
  const float* logits = host_V.const_data_ptr<float>();
  const int64_t size = host_V.numel();
  check_argument(size > 0 && std::all_of(logits, logits + size, [](float x) { return std::isfinite(x); }),
                 "sample_token", "logits_V: empty or not finite");
  const bool greedy = options.temperature == 0.0;
  const std::vector<double> p = softmax(logits, size, greedy ? 1.0 : options.temperature);
  if (greedy) {
    const int64_t best = std::max_element(logits, logits + size) - logits;
    return {best, std::log(p[best])};
  }
  std::vector<int64_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return p[a] > p[b]; });
  size_t kept = 0;
  double mass = 0.0;
  while (kept < order.size() && (kept == 0 || mass < options.top_p)) mass += p[order[kept++]];
  double target = Rng(options.seed, 0, index).uniform() * mass;
  for (size_t i = 0; i < kept; ++i) {
    target -= p[order[i]];
    if (target < 0.0) return {order[i], std::log(p[order[i]])};
  }
  return {order[kept - 1], std::log(p[order[kept - 1]])};  // rounding left a crumb of mass
}

}  // namespace furlong
