#pragma once

// Packs documents into rows of a fixed number of tokens, mixes sources by weight, shuffles with a seed, and can go on
// from a saved cursor bit by bit. README.md says how the rows are filled.
//   N = rows * context tokens

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "furlong/base/json.h"
#include "furlong/data/shards.h"
#include "furlong/ops/common/sequence_layout.h"

namespace furlong {

/// One micro-batch. Every piece of a document in a row is a sequence of its own: KDA state, convolution and attention
/// restart there. targets_N[n] is the next token of the same document, also where the row ends before it; weight_N is 0
/// (and the target the token itself) where there is none, at a document's last token.
struct Batch {
  at::Tensor tokens_N;   // int64
  at::Tensor targets_N;  // int64
  at::Tensor weight_N;   // fp32, 0 or 1
  SequenceLayout layout;
  int64_t num_targets = 0;
};

struct SourceConfig {
  std::string name;
  std::string path;  // a folder of shards
  double weight = 1.0;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("name", name, {.doc = "name of the source: its cursor is kept under it; by default, its number"});
    visit("path", path, {.doc = "folder written by `furlong data prepare`", .required = true});
    visit("weight", weight, {.doc = "share of rows drawn from this source, relative to the others", .min = 0.0});
  }
};

/// The exact position in every source, the documents that are open with the token reached, and the draw counter. Plain
/// JSON: it goes into checkpoints as it is.
struct LoaderState {
  Json values;
};

class Loader {
 public:
  /// Rows of `context` >= 2 tokens. Documents are visited in a shuffled order that depends on (seed, source, epoch).
  /// Each source keeps several of them open ("lanes"); its rows take turns among them, and a row takes up where the
  /// last row of its lane stopped. Documents of fewer than 2 tokens teach nothing and are left out.
  Loader(const std::vector<SourceConfig>& sources, int64_t context, uint64_t seed);

  Batch next(int64_t rows);
  LoaderState state() const;
  /// A state saved under another context length, or with other sources or weights, is accepted: the cursors of the
  /// sources that both know carry over, by name. UsageError when a source's documents or the seed are not the same.
  void restore(const LoaderState& state);
  int64_t vocab_size() const;
  int64_t num_tokens() const;  // of all sources

 private:
  struct Source;
  Source& draw_source();

  std::vector<std::shared_ptr<Source>> sources_;
  int64_t context_;
  uint64_t seed_;
  uint64_t draws_ = 0;
  Json absent_ = Json::object();  // cursors of sources that this stage does not use, kept for a later one
};

}  // namespace furlong
