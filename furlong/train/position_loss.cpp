#include "furlong/train/position_loss.h"

#include <algorithm>
#include <bit>

namespace furlong {

void PositionLoss::add(int64_t position, double nats) {
  const int bucket = std::min(kBuckets - 1, static_cast<int>(std::bit_width(static_cast<uint64_t>(position))));
  nats_[bucket] += nats;
  ++targets_[bucket];
}

void PositionLoss::add(const at::Tensor& nll_N, const at::Tensor& weight_N, const at::Tensor& offsets_host,
                       int64_t first_position) {
  const at::Tensor nll = nll_N.to(at::kCPU, at::kFloat).contiguous();
  const at::Tensor weight = weight_N.to(at::kCPU, at::kFloat).contiguous();
  const float* nll_data = nll.const_data_ptr<float>();
  const float* weight_data = weight.const_data_ptr<float>();
  const int64_t* offsets = offsets_host.const_data_ptr<int64_t>();
  for (int64_t b = 0; b + 1 < offsets_host.size(0); ++b) {
    for (int64_t n = offsets[b]; n < offsets[b + 1]; ++n) {
      if (weight_data[n] != 0.0f) add(first_position + n - offsets[b], nll_data[n]);
    }
  }
}

OrderedJson PositionLoss::to_json() const {
  int buckets = kBuckets;
  while (buckets > 0 && targets_[buckets - 1] == 0) --buckets;
  OrderedJson first = OrderedJson::array();
  OrderedJson loss = OrderedJson::array();
  OrderedJson targets = OrderedJson::array();
  for (int i = 0; i < buckets; ++i) {
    first.push_back(i == 0 ? 0 : int64_t{1} << (i - 1));
    loss.push_back(targets_[i] > 0 ? OrderedJson(nats_[i] / static_cast<double>(targets_[i])) : OrderedJson());
    targets.push_back(targets_[i]);
  }
  return {{"first", first}, {"loss", loss}, {"targets", targets}};
}

}  // namespace furlong
