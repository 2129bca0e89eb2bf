#pragma once

// How the N packed tokens of a call divide into B sequences. There is no padding and no pad token: sequences lie end to
// end. Rows past the last sequence (n >= num_tokens()) are allowed, so that shapes can stay static: ops never read
// them, and their outputs and gradients are zero.
//
//   N packed tokens   B sequences   S state slots

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace furlong {

class SequenceLayout {
 public:
  /// Fresh sequences without carried state: training rows, evaluation.
  static SequenceLayout from_lengths(const std::vector<int64_t>& lengths, at::Device device = at::kCPU);
  /// Sequences that continue: sequence b lives in state slot slots[b] and has past[b] tokens in its state already.
  /// A slot may appear once.
  static SequenceLayout with_state(const std::vector<int64_t>& lengths, const std::vector<int64_t>& slots,
                                   const std::vector<int64_t>& past, at::Device device = at::kCPU);

  int64_t num_sequences() const { return static_cast<int64_t>(offsets_host_.size()) - 1; }
  int64_t num_tokens() const { return offsets_host_.back(); }
  int64_t max_length() const { return max_length_; }
  int64_t length(int64_t b) const { return offsets_host_[b + 1] - offsets_host_[b]; }
  int64_t start(int64_t b) const { return offsets_host_[b]; }
  int64_t past(int64_t b) const { return past_host_.empty() ? 0 : past_host_[b]; }
  int64_t slot(int64_t b) const { return slots_host_[b]; }
  bool has_state() const { return !slots_host_.empty(); }
  /// Every sequence brings exactly one token.
  bool is_decode() const { return max_length_ == 1 && num_tokens() == num_sequences(); }

  /// [B+1] int64 cumulative lengths on the device of the data, and the same on the host.
  const at::Tensor& offsets() const { return offsets_; }
  const at::Tensor& offsets_host() const { return offsets_host_tensor_; }
  /// [B] int64 on the device; defined when has_state().
  const at::Tensor& slots() const { return slots_; }
  const at::Tensor& past() const { return past_; }

 private:
  std::vector<int64_t> offsets_host_{0};
  std::vector<int64_t> slots_host_;
  std::vector<int64_t> past_host_;
  int64_t max_length_ = 0;
  at::Tensor offsets_;
  at::Tensor offsets_host_tensor_;
  at::Tensor slots_;
  at::Tensor past_;
};

}  // namespace furlong
