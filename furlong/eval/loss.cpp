#include "furlong/eval/loss.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "furlong/base/clock.h"
#include "furlong/base/error.h"
#include "furlong/model/state.h"
#include "furlong/ops/cross_entropy/cross_entropy.h"

namespace furlong {

namespace {

/// Inputs [first, first + count) of a document, to predict the token after each of them.
struct Piece {
  int64_t document = 0;
  int64_t first = 0;
  int64_t count = 0;
};

class LossRun {
 public:
  LossRun(const Decoder& decoder, const ShardSet& shards, const LossOptions& options)
      : decoder_(decoder), shards_(shards), options_(options), device_(decoder.device()) {
    report_.documents.resize(shards.num_documents());
    for (int64_t d = 0; d < shards.num_documents(); ++d) add_document(d);
    flush();
  }
  LossReport take() { return std::move(report_); }

 private:
  void add_document(int64_t document) {
    const int64_t tokens = shards_.document_length(document);
    DocumentLoss& row = report_.documents[document];
    row = {document, tokens, shards_.document_bytes(document), 0.0};
    if (tokens > 0) row.nats = std::log(static_cast<double>(decoder_.config().vocab_size));
    const int64_t window = options_.window > 0 ? options_.window : std::numeric_limits<int64_t>::max();
    for (int64_t first = 0; first < tokens - 1; first += std::min(window, tokens - 1 - first)) {
      add_sequence({document, first, std::min(window, tokens - 1 - first)});
    }
  }

  /// Short sequences are packed into one forward pass; a long one runs in chunks with a state of its own.
  void add_sequence(const Piece& sequence) {
    if (sequence.count > options_.chunk) {
      run_long(sequence);
      return;
    }
    if (pending_tokens_ + sequence.count > options_.chunk) flush();
    pending_.push_back(sequence);
    pending_tokens_ += sequence.count;
  }

  void flush() {
    if (pending_.empty()) return;
    std::vector<int64_t> lengths;
    for (const Piece& piece : pending_) lengths.push_back(piece.count);
    run(pending_, SequenceLayout::from_lengths(lengths, device_), nullptr, 0);
    pending_.clear();
    pending_tokens_ = 0;
  }

  void run_long(const Piece& sequence) {
    DecoderState state(decoder_, 1);
    for (int64_t done = 0; done < sequence.count; done += options_.chunk) {
      const int64_t count = std::min(options_.chunk, sequence.count - done);
      run({{sequence.document, sequence.first + done, count}}, state.layout({0}, {count}), &state, done);
    }
  }

  void run(const std::vector<Piece>& pieces, const SequenceLayout& layout, DecoderState* state, int64_t position) {
    const int64_t total = layout.num_tokens();
    at::Tensor tokens_N = at::empty({total}, at::kLong);
    at::Tensor targets_N = at::empty({total}, at::kLong);
    for (size_t b = 0; b < pieces.size(); ++b) {
      const int64_t start = layout.start(static_cast<int64_t>(b));
      const auto [document, first, count] = pieces[b];
      shards_.copy_tokens(document, first, count, tokens_N.mutable_data_ptr<int64_t>() + start);
      shards_.copy_tokens(document, first + 1, count, targets_N.mutable_data_ptr<int64_t>() + start);
    }
    const at::Tensor weight_N = at::ones({total}, at::kFloat);
    const at::Tensor hidden_ND = decoder_.forward(tokens_N.to(device_), layout, state, {});
    const at::Tensor nll_N = std::get<1>(
        linear_cross_entropy(hidden_ND, decoder_.head_weight(), targets_N.to(device_), weight_N.to(device_)));
    count_nats(pieces, layout, nll_N.to(at::kCPU), position);
    report_.by_position.add(nll_N, weight_N, layout.offsets_host(), position);
  }

  void count_nats(const std::vector<Piece>& pieces, const SequenceLayout& layout, const at::Tensor& nll_N,
                  int64_t position) {
    const float* nll = nll_N.const_data_ptr<float>();
    for (size_t b = 0; b < pieces.size(); ++b) {
      const int64_t start = layout.start(static_cast<int64_t>(b));
      double& nats = report_.documents[pieces[b].document].nats;
      for (int64_t n = start; n < start + pieces[b].count; ++n) nats += nll[n];
      if (std::isfinite(nats)) continue;
      throw NumericError(fmt::format("the loss of document {} is not finite at token {}", pieces[b].document,
                                     pieces[b].first + position));
    }
  }

  const Decoder& decoder_;
  const ShardSet& shards_;
  LossOptions options_;
  at::Device device_;
  LossReport report_;
  std::vector<Piece> pending_;
  int64_t pending_tokens_ = 0;
};

}  // namespace

double LossReport::bits_per_byte() const {
  return nats / std::numbers::ln2 / static_cast<double>(bytes);
}

OrderedJson LossReport::to_json() const {
  OrderedJson rows = OrderedJson::array();
  for (const DocumentLoss& row : documents) {
    rows.push_back(
        {{"document", row.document},
         {"tokens", row.tokens},
         {"bytes", row.bytes},
         {"nats", row.nats},
         {"bits_per_byte", row.nats / std::numbers::ln2 / static_cast<double>(std::max<int64_t>(row.bytes, 1))}});
  }
  return {{"nats_per_token", nats_per_token()},
          {"bits_per_byte", bits_per_byte()},
          {"nats", nats},
          {"tokens", tokens},
          {"bytes", bytes},
          {"num_documents", static_cast<int64_t>(documents.size())},
          {"seconds", seconds},
          {"position_loss", by_position.to_json()},
          {"documents", rows}};
}

LossReport evaluate_loss(const Decoder& decoder, const ShardSet& shards, const LossOptions& options) {
  if (shards.num_tokens() == 0 || shards.num_bytes() == 0) throw UsageError("the shards hold no text to evaluate");
  if (shards.vocab_size() > decoder.config().vocab_size) {
    throw UsageError(fmt::format("the shards' tokenizer has {} entries, the model's vocabulary {}", shards.vocab_size(),
                                 decoder.config().vocab_size));
  }
  const at::NoGradGuard no_grad;
  const Stopwatch watch;
  LossReport report = LossRun(decoder, shards, options).take();
  for (const DocumentLoss& row : report.documents) {
    report.tokens += row.tokens;
    report.bytes += row.bytes;
    report.nats += row.nats;
  }
  report.seconds = watch.seconds();
  return report;
}

}  // namespace furlong
