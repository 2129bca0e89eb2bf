#include "tests/acceptance/split_cases.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "tests/support/gradient.h"
#include "tests/support/tolerance.h"

namespace furlong::testing_support {

using testing::relative_error;

namespace {

constexpr int64_t kChunks[] = {1, 2, 3, 5, 16, 63, 64, 65};

/// Error of the logits from token `first` on, relative to the largest logit of the sequence.
double piece_error(const at::Tensor& logits_NV, const WholeRun& run, int64_t first) {
  at::Tensor all_NV = run.logits_NV.clone();
  all_NV.slice(0, first, first + logits_NV.size(0)).copy_(logits_NV);
  return relative_error(all_NV, run.logits_NV);
}

/// Feeds all sequences together until they end, sequence s of call c with counts[c + s] tokens (taken in a circle).
void check_packed_as(const std::string& name, const std::vector<int64_t>& counts, const Decoder& decoder,
                     const Sequences& sequences, SplitReport& report) {
  const at::NoGradGuard no_grad;
  constexpr size_t kOrder[] = {1, 0, 2};  // the sequence under test lies in the middle
  DecoderState state(decoder, 4);
  double logit_error = 0.0, worst_state = 0.0;
  for (size_t call = 0;; ++call) {
    std::vector<Piece> pieces;
    for (const size_t s : kOrder) {
      const WholeRun& run = sequences.runs[s];
      const int64_t slot = 3 - static_cast<int64_t>(s), first = state.position(slot);
      const int64_t count = std::min(counts[(call + s) % counts.size()], run.tokens_N.size(0) - first);
      if (count > 0) pieces.push_back({&run, slot, first, first + count});
    }
    if (pieces.empty()) break;
    const at::Tensor logits_NV = decoder.logits(feed(decoder, state, pieces));
    int64_t start = 0;
    for (const Piece& piece : pieces) {
      const int64_t end = start + piece.last - piece.first;
      logit_error = std::max(logit_error, piece_error(logits_NV.slice(0, start, end), *piece.run, piece.first));
      start = end;
    }
  }
  for (size_t s = 0; s < sequences.states.size(); ++s) {
    const SequenceState got = state.snapshot(3 - static_cast<int64_t>(s));
    worst_state = std::max(worst_state, state_error(got, sequences.states[s]));
  }
  report.judge(name, logit_error, worst_state);
}

/// Lengths, around those of a chunk, that fill `total` tokens.
std::vector<int64_t> document_lengths(int64_t total) {
  constexpr int64_t kCircle[] = {1, 40, 65, 3, 130, 64};
  std::vector<int64_t> lengths;
  for (size_t d = 0; total > 0; ++d) {
    lengths.push_back(std::min(kCircle[d % std::size(kCircle)], total));
    total -= lengths.back();
  }
  return lengths;
}

std::vector<at::Tensor> packed_expert_ids(const Decoder& decoder, const at::Tensor& tokens_N,
                                          const std::vector<int64_t>& lengths) {
  const at::NoGradGuard no_grad;
  ForwardRecord record;
  decoder.forward(tokens_N, SequenceLayout::from_lengths(lengths), nullptr, {.record = &record});
  std::vector<at::Tensor> ids;
  for (const LayerRecord& layer : record.layers) ids.push_back(layer.expert_ids_NA);
  return ids;
}

struct LossAndGradients {
  double loss = 0.0;
  std::vector<at::Tensor> gradients;
};

LossAndGradients run_packed(const Decoder& decoder, const at::Tensor& tokens_N, const std::vector<int64_t>& lengths,
                            const std::vector<at::Tensor>& ids) {
  const at::Tensor loss = next_token_loss(decoder, tokens_N, lengths, &ids);
  loss.backward();
  return {loss.item<double>(), take_gradients(decoder)};
}

LossAndGradients run_separate(const Decoder& decoder, const at::Tensor& tokens_N, const std::vector<int64_t>& lengths,
                              const std::vector<at::Tensor>& ids) {
  LossAndGradients sum;
  int64_t start = 0;
  for (const int64_t length : lengths) {
    std::vector<at::Tensor> own_ids(ids.size());
    for (size_t layer = 0; layer < ids.size(); ++layer) {
      if (ids[layer].defined()) own_ids[layer] = ids[layer].slice(0, start, start + length);
    }
    const at::Tensor loss = next_token_loss(decoder, tokens_N.slice(0, start, start + length), {length}, &own_ids);
    loss.backward();
    sum.loss += loss.item<double>();
    start += length;
  }
  sum.gradients = take_gradients(decoder);
  return sum;
}

}  // namespace

void SplitReport::line(const std::string& name, const std::string& text, bool passed) {
  std::printf("%-28s %s  %s\n", name.c_str(), text.c_str(), passed ? "ok" : "FAILED");
  std::fflush(stdout);
  if (!passed) ++failures_;
}

void SplitReport::show(const std::string& name, const std::string& text) const {
  std::printf("%-28s %s\n", name.c_str(), text.c_str());
  std::fflush(stdout);
}

void SplitReport::judge(const std::string& name, double logit_error, double state_error) {
  logit_ = std::max(logit_, logit_error);
  state_ = std::max(state_, state_error);
  line(name, fmt::format("logit {:.1e}  state {:.1e}", logit_error, state_error),
       logit_error <= tolerance::kLogitsSplit && state_error <= tolerance::kStateSplit);
}

void SplitReport::judge_same_bits(const std::string& name, bool same) {
  line(name, same ? "same bits" : "other bits", same);
}

void SplitReport::judge_documents(const std::string& name, double loss_error, double gradient_error,
                                  const std::string& worst_name) {
  gradient_ = std::max(gradient_, gradient_error);
  line(name, fmt::format("loss {:.1e}  gradient {:.1e} ({})", loss_error, gradient_error, worst_name),
       loss_error <= tolerance::kFp32Chain && gradient_error <= tolerance::kFp32Model);
}

void SplitReport::show_flips(const std::string& name, const std::vector<RoutingFlip>& flips) {
  for (const RoutingFlip& flip : flips) {
    show(name, fmt::format("flip: token {}, layer {}, margin {:.1e}", flip.token, flip.layer, flip.margin));
    margins_.push_back(flip.margin);
  }
}

bool SplitReport::finish() const {
  std::string flips = "no routing flip";
  if (!margins_.empty()) {
    const auto [low, high] = std::minmax_element(margins_.begin(), margins_.end());
    flips = fmt::format("{} routing flips (margins {:.1e} to {:.1e})", margins_.size(), *low, *high);
  }
  std::printf("%zu splits, packed, saved, gradients: worst logit %.1e, state %.1e, gradient %.1e, %s; %d failed\n",
              std::size(kChunks), logit_, state_, gradient_, flips.c_str(), failures_);
  return failures_ == 0;
}

Sequences run_sequences(const Decoder& decoder, const std::vector<at::Tensor>& tokens) {
  Sequences sequences;
  for (const at::Tensor& tokens_N : tokens) {
    sequences.runs.push_back(run_whole(decoder, tokens_N));
    sequences.states.push_back(run_split(decoder, sequences.runs.back(), tokens_N.size(0)).state);
  }
  return sequences;
}

void check_chunks(const Decoder& decoder, const Sequences& sequences, SplitReport& report) {
  for (const int64_t chunk : kChunks) {
    const SplitRun split = run_split(decoder, sequences.runs[0], chunk);
    report.judge(fmt::format("chunks of {}", chunk), relative_error(split.logits_NV, sequences.runs[0].logits_NV),
                 state_error(split.state, sequences.states[0]));
  }
}

void show_exact_chunks(const Decoder& decoder, const at::Tensor& tokens_N, const SplitReport& report) {
  const WholeRun whole = run_whole(decoder, tokens_N, Numerics::kExact);
  const SequenceState end = run_split(decoder, whole, tokens_N.size(0), Numerics::kExact).state;
  for (const int64_t chunk : kChunks) {
    const SplitRun split = run_split(decoder, whole, chunk, Numerics::kExact);
    const bool same = at::equal(split.logits_NV, whole.logits_NV) && same_bits(split.state, end);
    report.show(fmt::format("exact, chunks of {}", chunk),
                fmt::format("logit {:.1e}  state {:.1e}  {}", relative_error(split.logits_NV, whole.logits_NV),
                            state_error(split.state, end), same ? "same bits" : "other bits"));
  }
}

void show_flips(const Decoder& decoder, const Sequences& sequences, SplitReport& report) {
  for (const int64_t chunk : kChunks) {
    report.show_flips(fmt::format("free, chunks of {}", chunk), find_routing_flips(decoder, sequences.runs[0], chunk));
  }
}

void check_packed(const Decoder& decoder, const Sequences& sequences, SplitReport& report) {
  check_packed_as("packed, one call", {std::numeric_limits<int64_t>::max()}, decoder, sequences, report);
  check_packed_as("packed, ragged calls", {20, 64, 1, 31, 2, 130}, decoder, sequences, report);
}

void check_documents(const Decoder& decoder, const at::Tensor& tokens_N, SplitReport& report) {
  for (const Param& param : decoder.params()) {
    param.tensor->set_requires_grad(param.spec.rule != OptimizerRule::kFrozen);
  }
  const std::vector<int64_t> lengths = document_lengths(tokens_N.size(0));
  const std::vector<at::Tensor> ids = packed_expert_ids(decoder, tokens_N, lengths);
  const LossAndGradients packed = run_packed(decoder, tokens_N, lengths, ids);
  const LossAndGradients separate = run_separate(decoder, tokens_N, lengths, ids);
  double worst = 0.0;
  std::string worst_name = "none";
  for (size_t i = 0; i < packed.gradients.size(); ++i) {
    if (!packed.gradients[i].defined() && !separate.gradients[i].defined()) continue;
    const double error = relative_error(packed.gradients[i], separate.gradients[i]);
    if (error < worst) continue;
    worst = error;
    worst_name = decoder.params()[i].spec.name;
  }
  report.judge_documents(fmt::format("{} documents packed", lengths.size()),
                         std::abs(packed.loss / separate.loss - 1.0), worst, worst_name);
}

bool same_bits(const SequenceState& a, const SequenceState& b) {
  return a.position == b.position && a.token_hash == b.token_hash &&
         std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return at::equal(x, y); });
}

}  // namespace furlong::testing_support
