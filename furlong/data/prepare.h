#pragma once

// Text to token shards: what `furlong data prepare` does.

#include <cstdint>
#include <filesystem>

#include "furlong/data/corpus.h"
#include "furlong/data/shard_writer.h"

namespace furlong {

struct PrepareOptions {
  CorpusOptions corpus;
  std::filesystem::path tokenizer;  // a folder with tiktoken.model
  std::filesystem::path out;
  double val_fraction = 0.0;  // > 0: writes OUT/train and OUT/val
  uint64_t seed = 0;          // of the choice of validation documents
  int64_t shard_tokens = ShardWriter::kDefaultShardTokens;
};

struct PrepareReport {
  CorpusCounts corpus;
  ShardTotals train;  // or all, without validation part
  ShardTotals val;
};

/// Writes the folder `out` whole or not at all. An older folder of shards there is replaced; anything else that is not
/// empty is refused (UsageError). The tokenizer's files are copied into it.
PrepareReport prepare_shards(const PrepareOptions& options);

/// Whether document number `index` is one of the validation documents: one, drawn at random, of every 1 / fraction.
bool is_val_document(int64_t index, double fraction, uint64_t seed);

}  // namespace furlong
