#pragma once

// One sequence run whole, in pieces, or packed between others, and how far the results lie apart.
//   N tokens   V vocabulary   A experts chosen for a token

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "furlong/model/decoder.h"
#include "furlong/model/state.h"

namespace furlong::testing_support {

/// One forward over a fresh sequence without state: the form that training uses.
struct WholeRun {
  at::Tensor tokens_N, hidden_ND, logits_NV;
  std::vector<at::Tensor> expert_ids;  // per layer, [N, A]; undefined where the layer is dense
  std::vector<at::Tensor> margins;     // per layer, [N]: by how much the last chosen expert beat the next
};

WholeRun run_whole(const Decoder& decoder, const at::Tensor& tokens_N, Numerics numerics = Numerics::kFast);

/// A piece of a sequence: tokens [first, last) of `run`, in a slot.
struct Piece {
  const WholeRun* run;
  int64_t slot, first, last;
};

struct FeedOptions {
  Numerics numerics = Numerics::kFast;
  bool replay = true;  // the expert ids of the whole runs; false: the router chooses
  ForwardRecord* record = nullptr;
};

/// Feeds pieces of several sequences in one forward. Hidden states, packed.
at::Tensor feed(const Decoder& decoder, DecoderState& state, const std::vector<Piece>& pieces,
                const FeedOptions& options = {});

struct SplitRun {
  at::Tensor logits_NV;
  SequenceState state;  // at the end
};

/// A sequence fed in pieces of `chunk` tokens with the expert ids of its whole run.
SplitRun run_split(const Decoder& decoder, const WholeRun& run, int64_t chunk, Numerics numerics = Numerics::kFast);

/// A choice of experts that differs from the whole run's, if the router is free.
struct RoutingFlip {
  int64_t layer, token;
  double margin;  // of the whole run
};

/// The sequence in pieces of `chunk` tokens with the router free.
std::vector<RoutingFlip> find_routing_flips(const Decoder& decoder, const WholeRun& run, int64_t chunk);

/// Largest relative error of a state's tensors; infinite where position, token hash or number of tensors differ.
double state_error(const SequenceState& got, const SequenceState& expected);

/// Sum of the next-token losses of documents that lie end to end. `expert_ids`: replayed, if not null.
at::Tensor next_token_loss(const Decoder& decoder, const at::Tensor& tokens_N, const std::vector<int64_t>& lengths,
                           const std::vector<at::Tensor>* expert_ids = nullptr);

/// The gradients of all parameters, in their order, which lose them. Undefined where there is none.
std::vector<at::Tensor> take_gradients(const Decoder& decoder);

}  // namespace furlong::testing_support
