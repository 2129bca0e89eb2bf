#pragma once

// Writes a folder of token shards (see shards.h).

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "furlong/base/json.h"

namespace furlong {

struct ShardTotals {
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t bytes = 0;  // of source text
  int64_t shards = 0;
};

class ShardWriter {
 public:
  static constexpr int64_t kDefaultShardTokens = int64_t{64} << 20;

  /// Writes into an existing folder. A shard holds at most `shard_tokens` tokens, or one document.
  ShardWriter(std::filesystem::path folder, int64_t vocab_size, int64_t shard_tokens = kDefaultShardTokens);

  /// Token ids must lie in [0, vocab_size): UsageError.
  void add_document(const std::vector<int64_t>& tokens, int64_t source_bytes);
  /// Writes the last shard and meta.json. `documents_end_with` is the id that ends every document, or -1.
  ShardTotals finish(const std::string& tokenizer_sha256, int64_t documents_end_with);

 private:
  void flush();

  std::filesystem::path folder_;
  int64_t vocab_size_;
  int64_t shard_tokens_;
  int64_t token_bytes_;
  std::vector<std::byte> tokens_;  // of the open shard, as they will stand in the file
  std::vector<int64_t> document_offsets_ = {0};
  std::vector<int64_t> document_bytes_;
  OrderedJson shards_ = OrderedJson::array();
  ShardTotals totals_;
};

}  // namespace furlong
