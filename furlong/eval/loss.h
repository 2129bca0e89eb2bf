#pragma once

// Loss of a model on documents: every document from an empty state, all of its tokens counted.
//
// A document's first token has no prediction (the state is empty and training never asks for it): its cost is
// log(vocabulary), the code length of a uniform guess. So the nats are those of a complete code of the text, and bits
// per byte = nats / ln 2 / source bytes compares with a compressor's.

#include <cstdint>
#include <filesystem>
#include <vector>

#include "furlong/base/json.h"
#include "furlong/data/shards.h"
#include "furlong/model/decoder.h"
#include "furlong/train/position_loss.h"

namespace furlong {

struct LossOptions {
  int64_t chunk = 2048;  // tokens a forward pass
  int64_t window = 0;    // start from an empty state every so many tokens (0: never); the token before a window is its
                         // first input, so that only a document's first token goes unpredicted
};

struct DocumentLoss {
  int64_t document = 0;
  int64_t tokens = 0;
  int64_t bytes = 0;
  double nats = 0.0;
};

struct LossReport {
  int64_t tokens = 0;
  int64_t bytes = 0;
  double nats = 0.0;
  double seconds = 0.0;
  PositionLoss by_position;
  std::vector<DocumentLoss> documents;

  double nats_per_token() const { return nats / static_cast<double>(tokens); }
  double bits_per_byte() const;
  OrderedJson to_json() const;
};

/// UsageError when the shards hold no document, or ids that the model does not know.
LossReport evaluate_loss(const Decoder& decoder, const ShardSet& shards, const LossOptions& options);

}  // namespace furlong
