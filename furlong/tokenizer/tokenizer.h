#pragma once

// Byte-level BPE in tiktoken's form: lines "base64(bytes) SP rank". Encode and decode are exact for any bytes.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace furlong {

class Tokenizer {
 public:
  /// A rank file, or a folder holding "tiktoken.model". FormatError names file and line.
  static Tokenizer load(const std::filesystem::path& file_or_folder);
  static Tokenizer from_text(std::string_view ranks, const std::string& name);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// Ordinary text only: special tokens are never matched in it. Invalid UTF-8 is encoded byte by byte.
  std::vector<int64_t> encode(std::string_view text) const;
  std::string decode(const std::vector<int64_t>& ids) const;
  /// The bytes of one token. UsageError when out of range.
  std::string_view token_bytes(int64_t id) const;
  /// Ranks plus reserved special ids.
  int64_t vocab_size() const;
  /// Id that ends a document ("[EOS]"), the last id but one of the reserved block; see special_tokens.h.
  int64_t end_of_document() const;
  const std::string& sha256() const;  // of the rank file

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Decodes a stream token by token without ever breaking a UTF-8 character: returns the bytes that are complete.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  std::string push(int64_t id);
  /// What is left over at the end (an incomplete character), as it is.
  std::string flush();

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;
};

}  // namespace furlong
