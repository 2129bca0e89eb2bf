#include "furlong/infer/engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>

#include "furlong/base/clock.h"
#include "furlong/base/error.h"

namespace furlong {

namespace {

constexpr int64_t kSlot = 0;

bool contains(const std::vector<int64_t>& ids, int64_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

Engine::Engine(const Decoder& decoder, const EngineOptions& options)
    : decoder_(decoder), options_(options), state_(decoder, 1) {
  if (options.prefill_chunk_tokens < 1) throw UsageError("prefill chunk: need at least one token");
}

void Engine::check(const GenerateRequest& request) const {
  if (request.prompt_ids.empty()) throw UsageError("prompt: is empty, need at least one token");
  if (request.max_tokens < 0) throw UsageError(fmt::format("max-tokens: got {}, need 0 or more", request.max_tokens));
  const int64_t total = static_cast<int64_t>(request.prompt_ids.size()) + request.max_tokens;
  if (total > decoder_.config().max_context) {
    throw UsageError(fmt::format("prompt and max-tokens: {} tokens together, the model's context is {}", total,
                                 decoder_.config().max_context));
  }
  if (request.num_ids < 0) throw UsageError(fmt::format("num-ids: got {}, need 0 or more", request.num_ids));
  request.sampling.validate();
}

at::Tensor Engine::feed(const std::vector<int64_t>& ids) {
  const auto total = static_cast<int64_t>(ids.size());
  at::Tensor hidden_ND;
  for (int64_t first = 0; first < total; first += options_.prefill_chunk_tokens) {
    const int64_t length = std::min(options_.prefill_chunk_tokens, total - first);
    const at::Tensor tokens_N =
        at::tensor(at::ArrayRef<int64_t>(ids.data() + first, length), at::kLong).to(decoder_.device());
    ForwardOptions options;
    options.numerics = options_.numerics;
    hidden_ND = decoder_.forward(tokens_N, state_.layout({kSlot}, {length}), &state_, options);
  }
  return decoder_.logits(hidden_ND.slice(0, hidden_ND.size(0) - 1), options_.numerics).squeeze(0);
}

GenerateResult Engine::generate(const GenerateRequest& request, const OnToken& on_token) {
  check(request);
  const at::NoGradGuard no_grad;
  state_.reset(kSlot);
  const int64_t vocabulary = decoder_.config().vocab_size;
  const int64_t num_ids = request.num_ids == 0 ? vocabulary : std::min(request.num_ids, vocabulary);
  GenerateResult result;
  result.prompt_tokens = static_cast<int64_t>(request.prompt_ids.size());
  Stopwatch watch;
  at::Tensor logits_V = feed(request.prompt_ids);
  result.prefill_seconds = watch.seconds();
  watch.restart();
  while (static_cast<int64_t>(result.ids.size()) < request.max_tokens) {
    if (!result.ids.empty()) logits_V = feed({result.ids.back()});
    const Sample sample = sample_token(logits_V.slice(0, 0, num_ids), request.sampling, result.ids.size());
    if (contains(request.stop_ids, sample.id)) {
      result.reason = StopReason::kStopId;
      break;
    }
    result.ids.push_back(sample.id);
    result.log_probabilities.push_back(sample.log_probability);
    if (on_token && !on_token(sample.id)) {
      result.reason = StopReason::kCancelled;
      break;
    }
  }
  result.decode_seconds = watch.seconds();
  return result;
}

}  // namespace furlong
