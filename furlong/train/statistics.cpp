#include "furlong/train/statistics.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <cmath>

namespace furlong {

namespace {

double mean_of(const std::vector<double>& load) {
  double sum = 0.0;
  for (const double tokens : load) sum += tokens;
  return sum / static_cast<double>(load.size());
}

/// sum += scale * value, in fp64: loads stay exact up to 2^53.
void accumulate(at::Tensor& sum, const at::Tensor& value, double scale) {
  if (!value.defined()) return;
  const at::Tensor scaled = value.detach().to(at::kDouble).reshape(-1).mul(scale);
  sum = sum.defined() ? sum.add_(scaled) : scaled;
}

/// Hands out consecutive pieces of one host vector in the order in which their tensors were gathered.
class Gather {
 public:
  void add(const at::Tensor& tensor) {
    if (tensor.defined()) tensors_.push_back(tensor);
  }
  void fetch() {
    if (tensors_.empty()) return;
    const at::Tensor all = at::cat(tensors_).to(at::kCPU).contiguous();
    const double* data = all.const_data_ptr<double>();
    values_.assign(data, data + all.numel());
  }
  std::vector<double> take(const at::Tensor& tensor, double divisor) {
    if (!tensor.defined()) return {};
    std::vector<double> piece(values_.begin() + next_, values_.begin() + next_ + tensor.numel());
    next_ += tensor.numel();
    for (double& value : piece) value /= divisor;
    return piece;
  }
  std::optional<double> take_one(const at::Tensor& tensor, double divisor) {
    const std::vector<double> piece = take(tensor, divisor);
    return piece.empty() ? std::optional<double>() : piece.front();
  }

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<double> values_;
  int64_t next_ = 0;
};

}  // namespace

double max_violation_of(const std::vector<double>& load) {
  const double mean = mean_of(load);
  return mean > 0.0 ? *std::max_element(load.begin(), load.end()) / mean - 1.0 : 0.0;
}

double variation_of(const std::vector<double>& load) {
  const double mean = mean_of(load);
  if (!(mean > 0.0)) return 0.0;
  double squares = 0.0;
  for (const double tokens : load) squares += (tokens - mean) * (tokens - mean);
  return std::sqrt(squares / static_cast<double>(load.size())) / mean;
}

void StepStatistics::add(const ForwardRecord& record, int64_t num_tokens) {
  const at::NoGradGuard no_grad;
  sums_.resize(std::max(sums_.size(), record.layers.size()));
  const auto tokens = static_cast<double>(num_tokens);
  for (size_t i = 0; i < record.layers.size(); ++i) {
    const LayerRecord& layer = record.layers[i];
    accumulate(sums_[i].load, layer.load_E, 1.0);
    accumulate(sums_[i].decay_saturated, layer.decay_saturated, tokens);
    accumulate(sums_[i].decay_open, layer.decay_open, tokens);
    accumulate(sums_[i].beta_mean, layer.beta_mean, tokens);
    accumulate(sums_[i].attention_depth, layer.attention_depth_weight_S, tokens);
    accumulate(sums_[i].mlp_depth, layer.mlp_depth_weight_S, tokens);
  }
  accumulate(output_depth_, record.output_depth_weight_S, tokens);
  num_tokens_ += num_tokens;
}

void StepStatistics::finish() {
  Gather gather;
  for (const Sums& sums : sums_) {
    for (const at::Tensor* tensor : {&sums.load, &sums.decay_saturated, &sums.decay_open, &sums.beta_mean,
                                     &sums.attention_depth, &sums.mlp_depth}) {
      gather.add(*tensor);
    }
  }
  gather.add(output_depth_);
  gather.fetch();
  const auto tokens = static_cast<double>(std::max<int64_t>(num_tokens_, 1));
  for (const Sums& sums : sums_) {
    LayerStatistics& layer = layers_.emplace_back();
    layer.load = gather.take(sums.load, 1.0);
    layer.decay_saturated = gather.take_one(sums.decay_saturated, tokens);
    layer.decay_open = gather.take_one(sums.decay_open, tokens);
    layer.beta_mean = gather.take_one(sums.beta_mean, tokens);
    layer.attention_depth_weight = gather.take(sums.attention_depth, tokens);
    layer.mlp_depth_weight = gather.take(sums.mlp_depth, tokens);
  }
  output_depth_weight_ = gather.take(output_depth_, tokens);
}

}  // namespace furlong
