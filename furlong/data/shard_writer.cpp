#include "furlong/data/shard_writer.h"

#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include "furlong/base/error.h"
#include "furlong/checkpoint/safetensors.h"

namespace furlong {

namespace {

constexpr int64_t kMaxNarrowVocabulary = 65'536;

std::string shard_name(size_t index) {
  std::string number = std::to_string(index);
  if (number.size() < 5) number.insert(0, 5 - number.size(), '0');
  return "shard-" + number + ".safetensors";
}

}  // namespace

ShardWriter::ShardWriter(std::filesystem::path folder, int64_t vocab_size, int64_t shard_tokens)
    : folder_(std::move(folder)),
      vocab_size_(vocab_size),
      shard_tokens_(shard_tokens),
      token_bytes_(vocab_size <= kMaxNarrowVocabulary ? 2 : 4) {}

void ShardWriter::add_document(const std::vector<int64_t>& tokens, int64_t source_bytes) {
  const auto count = static_cast<int64_t>(tokens.size());
  if (!document_bytes_.empty() && document_offsets_.back() + count > shard_tokens_) flush();
  size_t end = tokens_.size();
  tokens_.resize(end + static_cast<size_t>(count * token_bytes_));
  for (const int64_t token : tokens) {
    if (token < 0 || token >= vocab_size_) {
      throw UsageError("[shards] token: got " + std::to_string(token) + ", need 0 to " +
                       std::to_string(vocab_size_ - 1));
    }
    const auto wide = static_cast<uint32_t>(token);
    std::memcpy(&tokens_[end], &wide, static_cast<size_t>(token_bytes_));  // little-endian: the low bytes
    end += static_cast<size_t>(token_bytes_);
  }
  document_offsets_.push_back(document_offsets_.back() + count);
  document_bytes_.push_back(source_bytes);
}

void ShardWriter::flush() {
  const std::string name = shard_name(shards_.size());
  const int64_t tokens = document_offsets_.back();
  const auto documents = static_cast<int64_t>(document_bytes_.size());
  const int64_t bytes = std::accumulate(document_bytes_.begin(), document_bytes_.end(), int64_t{0});
  write_safetensors(folder_ / name,
                    {{"document_offsets", "I64", {documents + 1}, std::as_bytes(std::span(document_offsets_))},
                     {"document_bytes", "I64", {documents}, std::as_bytes(std::span(document_bytes_))},
                     {"tokens", token_bytes_ == 2 ? "U16" : "U32", {tokens}, tokens_}});
  shards_.push_back({{"file", name}, {"tokens", tokens}, {"documents", documents}, {"bytes", bytes}});
  totals_.tokens += tokens;
  totals_.documents += documents;
  totals_.bytes += bytes;
  ++totals_.shards;
  tokens_.clear();
  document_offsets_ = {0};
  document_bytes_.clear();
}

ShardTotals ShardWriter::finish(const std::string& tokenizer_sha256, int64_t documents_end_with) {
  if (!document_bytes_.empty()) flush();
  OrderedJson meta = {{"format", "furlong-shards"},
                      {"version", 1},
                      {"vocab_size", vocab_size_},
                      {"tokenizer_sha256", tokenizer_sha256},
                      {"documents_end_with", documents_end_with < 0 ? OrderedJson() : OrderedJson(documents_end_with)},
                      {"shards", shards_}};
  write_json_atomic(folder_ / "meta.json", meta);
  return totals_;
}

}  // namespace furlong
