#pragma once

// Tokenised corpora on disk: a folder of memory-mapped shards, written by `furlong data prepare`.
//
// FOLDER/meta.json   {"format": "furlong-shards", "version": 1, "vocab_size", "tokenizer_sha256", "shards": [{"file",
//                     "tokens", "documents", "bytes"}], "documents_end_with": id or null}
// FOLDER/shard-00000.safetensors   "tokens" U16 (vocabulary up to 65,536) or U32 [T], "document_offsets" I64 [d + 1]
//                     (token offsets), "document_bytes" I64 [d] (source bytes of each document)

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "furlong/base/json.h"

namespace furlong {

class SafetensorsFile;

class ShardSet {
 public:
  /// Opens and validates a folder. Errors name the folder or the shard.
  explicit ShardSet(const std::filesystem::path& folder);
  ~ShardSet();

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_documents() const { return static_cast<int64_t>(documents_.size()); }
  int64_t num_bytes() const { return num_bytes_; }
  int64_t vocab_size() const { return vocab_size_; }
  const std::string& tokenizer_sha256() const { return tokenizer_sha256_; }
  int64_t document_length(int64_t document) const { return documents_[document].tokens; }
  int64_t document_bytes(int64_t document) const { return documents_[document].bytes; }
  /// Copies tokens [first, first + count) of a document.
  void copy_tokens(int64_t document, int64_t first, int64_t count, int64_t* out) const;

 private:
  struct Document {
    int64_t shard, first_token, tokens, bytes;
  };
  std::vector<std::unique_ptr<SafetensorsFile>> shards_;
  std::vector<Document> documents_;
  int64_t num_tokens_ = 0, num_bytes_ = 0, vocab_size_ = 0;
  std::string tokenizer_sha256_;
};

}  // namespace furlong
