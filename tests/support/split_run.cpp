#include "tests/support/split_run.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>

#include "furlong/ops/cross_entropy/cross_entropy.h"
#include "tests/support/gradient.h"

namespace furlong::testing_support {

WholeRun run_whole(const Decoder& decoder, const at::Tensor& tokens_N, Numerics numerics) {
  const at::NoGradGuard no_grad;
  WholeRun run;
  run.tokens_N = tokens_N;
  ForwardRecord record;
  const ForwardOptions options{.numerics = numerics, .record = &record};
  run.hidden_ND = decoder.forward(tokens_N, SequenceLayout::from_lengths({tokens_N.size(0)}), nullptr, options);
  run.logits_NV = decoder.logits(run.hidden_ND, numerics);
  for (const LayerRecord& layer : record.layers) {
    run.expert_ids.push_back(layer.expert_ids_NA);
    run.margins.push_back(layer.margin_N);
  }
  return run;
}

at::Tensor feed(const Decoder& decoder, DecoderState& state, const std::vector<Piece>& pieces,
                const FeedOptions& options) {
  std::vector<at::Tensor> tokens;
  std::vector<int64_t> slots, lengths;
  for (const Piece& piece : pieces) {
    tokens.push_back(piece.run->tokens_N.slice(0, piece.first, piece.last));
    slots.push_back(piece.slot);
    lengths.push_back(piece.last - piece.first);
  }
  std::vector<at::Tensor> forced(decoder.config().num_layers);
  for (size_t layer = 0; layer < forced.size(); ++layer) {
    if (!pieces[0].run->expert_ids[layer].defined()) continue;
    std::vector<at::Tensor> ids;
    for (const Piece& piece : pieces) ids.push_back(piece.run->expert_ids[layer].slice(0, piece.first, piece.last));
    forced[layer] = at::cat(ids);
  }
  const ForwardOptions forward{
      .numerics = options.numerics, .record = options.record, .forced_expert_ids = options.replay ? &forced : nullptr};
  return decoder.forward(at::cat(tokens), state.layout(slots, lengths), &state, forward);
}

SplitRun run_split(const Decoder& decoder, const WholeRun& run, int64_t chunk, Numerics numerics) {
  const at::NoGradGuard no_grad;
  DecoderState state(decoder, 2);
  std::vector<at::Tensor> hidden;
  const int64_t total = run.tokens_N.size(0);
  for (int64_t first = 0; first < total; first += chunk) {
    hidden.push_back(feed(decoder, state, {{&run, 1, first, std::min(first + chunk, total)}}, {.numerics = numerics}));
  }
  return {decoder.logits(at::cat(hidden), numerics), state.snapshot(1)};
}

std::vector<RoutingFlip> find_routing_flips(const Decoder& decoder, const WholeRun& run, int64_t chunk) {
  const at::NoGradGuard no_grad;
  DecoderState state(decoder, 1);
  std::vector<RoutingFlip> flips;
  const int64_t total = run.tokens_N.size(0);
  for (int64_t first = 0; first < total; first += chunk) {
    const int64_t last = std::min(first + chunk, total);
    ForwardRecord record;
    feed(decoder, state, {{&run, 0, first, last}}, {.replay = false, .record = &record});
    for (size_t layer = 0; layer < record.layers.size(); ++layer) {
      if (!run.expert_ids[layer].defined()) continue;
      const auto got_NA = std::get<0>(record.layers[layer].expert_ids_NA.sort(1));
      const auto expected_NA = std::get<0>(run.expert_ids[layer].slice(0, first, last).sort(1));
      const at::Tensor rows = (got_NA != expected_NA).any(1).nonzero().view({-1});
      for (int64_t i = 0; i < rows.numel(); ++i) {
        const int64_t token = first + rows[i].item<int64_t>();
        flips.push_back({static_cast<int64_t>(layer), token, run.margins[layer][token].item<double>()});
      }
    }
  }
  return flips;
}

double state_error(const SequenceState& got, const SequenceState& expected) {
  if (got.position != expected.position || got.token_hash != expected.token_hash ||
      got.tensors.size() != expected.tensors.size()) {
    return std::numeric_limits<double>::infinity();
  }
  double worst = 0.0;
  for (size_t i = 0; i < got.tensors.size(); ++i) {
    worst = std::max(worst, testing::relative_error(got.tensors[i], expected.tensors[i]));
  }
  return worst;
}

at::Tensor next_token_loss(const Decoder& decoder, const at::Tensor& tokens_N, const std::vector<int64_t>& lengths,
                           const std::vector<at::Tensor>* expert_ids) {
  const ForwardOptions options{.forced_expert_ids = expert_ids};
  const at::Tensor hidden_ND = decoder.forward(tokens_N, SequenceLayout::from_lengths(lengths), nullptr, options);
  at::Tensor targets_N = at::zeros_like(tokens_N), weight_N = at::zeros({tokens_N.size(0)});
  int64_t start = 0;
  for (const int64_t length : lengths) {
    if (length > 1) {
      targets_N.slice(0, start, start + length - 1).copy_(tokens_N.slice(0, start + 1, start + length));
      weight_N.slice(0, start, start + length - 1).fill_(1.0);
    }
    start += length;
  }
  return std::get<0>(linear_cross_entropy(hidden_ND, decoder.head_weight(), targets_N, weight_N));
}

std::vector<at::Tensor> take_gradients(const Decoder& decoder) {
  std::vector<at::Tensor> gradients;
  for (const Param& param : decoder.params()) {
    gradients.push_back(param.tensor->grad());
    param.tensor->mutable_grad() = at::Tensor();
  }
  return gradients;
}

}  // namespace furlong::testing_support
