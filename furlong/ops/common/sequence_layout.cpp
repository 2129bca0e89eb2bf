#include "furlong/ops/common/sequence_layout.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <set>

#include "furlong/base/shape.h"

namespace furlong {

namespace {

at::Tensor to_tensor(const std::vector<int64_t>& values) {
  const auto size = static_cast<int64_t>(values.size());
  return at::from_blob(const_cast<int64_t*>(values.data()), {size}, at::kLong).clone();
}

}  // namespace

SequenceLayout SequenceLayout::from_lengths(const std::vector<int64_t>& lengths, at::Device device) {
  SequenceLayout layout;
  for (const int64_t length : lengths) {
    check_argument(length >= 0, "SequenceLayout", "lengths: got a negative length");
    layout.offsets_host_.push_back(layout.offsets_host_.back() + length);
    layout.max_length_ = std::max(layout.max_length_, length);
  }
  layout.offsets_host_tensor_ = to_tensor(layout.offsets_host_);
  layout.offsets_ = layout.offsets_host_tensor_.to(device);
  return layout;
}

SequenceLayout SequenceLayout::with_state(const std::vector<int64_t>& lengths, const std::vector<int64_t>& slots,
                                          const std::vector<int64_t>& past, at::Device device) {
  check_argument(slots.size() == lengths.size() && past.size() == lengths.size(), "SequenceLayout",
                 "slots and past: need one entry for each length");
  check_argument(std::set<int64_t>(slots.begin(), slots.end()).size() == slots.size(), "SequenceLayout",
                 "slots: a slot appears twice");
  SequenceLayout layout = from_lengths(lengths, device);
  layout.slots_host_ = slots;
  layout.past_host_ = past;
  layout.slots_ = to_tensor(slots).to(device);
  layout.past_ = to_tensor(past).to(device);
  return layout;
}

}  // namespace furlong
