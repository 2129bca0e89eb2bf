#pragma once

// The comparisons of split_check: a sequence whole against in chunks, packed, and as separate documents. fp32.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "furlong/model/decoder.h"
#include "furlong/model/state.h"
#include "tests/support/split_run.h"

namespace furlong::testing_support {

/// Prints a line for each case, and counts what exceeds its limit.
class SplitReport {
 public:
  void judge(const std::string& name, double logit_error, double state_error);
  void judge_same_bits(const std::string& name, bool same);
  /// Gradients relative to each tensor's largest; `worst_name` is the tensor of the largest error.
  void judge_documents(const std::string& name, double loss_error, double gradient_error,
                       const std::string& worst_name);
  void show_flips(const std::string& name, const std::vector<RoutingFlip>& flips);
  void show(const std::string& name, const std::string& text) const;
  /// The summary line. True when every limit was kept.
  bool finish() const;

 private:
  void line(const std::string& name, const std::string& text, bool passed);

  double logit_ = 0.0, state_ = 0.0, gradient_ = 0.0;
  std::vector<double> margins_;
  int failures_ = 0;
};

/// Sequences run whole, without state for the logits and with it for the final state. The first is under test.
struct Sequences {
  std::vector<WholeRun> runs;
  std::vector<SequenceState> states;
};
Sequences run_sequences(const Decoder& decoder, const std::vector<at::Tensor>& tokens);

/// Chunks of 1 (token by token), 2, 3, 5, 16, 63, 64 and 65 tokens, expert ids replayed.
void check_chunks(const Decoder& decoder, const Sequences& sequences, SplitReport& report);
/// The same in exact numerics, for information.
void show_exact_chunks(const Decoder& decoder, const at::Tensor& tokens_N, const SplitReport& report);
/// The same with the router free: lists where it chooses other experts than in the whole run.
void show_flips(const Decoder& decoder, const Sequences& sequences, SplitReport& report);
/// The first sequence between the others: all in one call, and each call with another number of tokens of each.
void check_packed(const Decoder& decoder, const Sequences& sequences, SplitReport& report);
/// Loss and gradients of documents packed in one forward against each alone, expert ids replayed. Makes the decoder's
/// parameters require gradients.
void check_documents(const Decoder& decoder, const at::Tensor& tokens_N, SplitReport& report);

bool same_bits(const SequenceState& a, const SequenceState& b);

}  // namespace furlong::testing_support
