#pragma once

// Generation: prefill in chunks, then token by token, on a pool of state slots. One request at a time; a scheduler that
// packs several requests into one forward stands on the same pieces (DecoderState slots, sample_token).

#include <cstdint>
#include <functional>
#include <vector>

#include "furlong/infer/sampler.h"
#include "furlong/model/decoder.h"
#include "furlong/model/state.h"

namespace furlong {

struct EngineOptions {
  int64_t prefill_chunk_tokens = 2048;  // most prompt tokens in one forward
  Numerics numerics = Numerics::kFast;
};

struct GenerateRequest {
  std::vector<int64_t> prompt_ids;  // at least one
  int64_t max_tokens = 128;
  std::vector<int64_t> stop_ids;
  SamplingOptions sampling;
  int64_t num_ids = 0;  // draw ids below this only: a model may have more entries than its tokenizer; 0: all of them
};

enum class StopReason { kMaxTokens, kStopId, kCancelled };

struct GenerateResult {
  std::vector<int64_t> ids;  // without the stop id
  std::vector<double> log_probabilities;
  StopReason reason = StopReason::kMaxTokens;
  int64_t prompt_tokens = 0;
  double prefill_seconds = 0.0;
  double decode_seconds = 0.0;
};

class Engine {
 public:
  explicit Engine(const Decoder& decoder, const EngineOptions& options = {});

  /// Called with each new token as soon as it is drawn; false stops the request.
  using OnToken = std::function<bool(int64_t id)>;

  /// A fresh sequence. UsageError on an empty prompt, an id outside the vocabulary or nonsensical sampling.
  GenerateResult generate(const GenerateRequest& request, const OnToken& on_token = {});

  /// UsageError when the request's numbers make no sense or ask for more tokens than the model's context.
  void check(const GenerateRequest& request) const;

  /// The state of the last request: its prompt and all tokens drawn but the last one.
  const DecoderState& state() const { return state_; }

 private:
  /// Feeds tokens to the slot; returns fp32 logits [V] after the last one.
  at::Tensor feed(const std::vector<int64_t>& ids);

  const Decoder& decoder_;
  EngineOptions options_;
  DecoderState state_;
};

}  // namespace furlong
