#pragma once

// Byte-level BPE in tiktoken's form: lines "base64(bytes) SP rank". Encode and decode are exact for any bytes.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace furlong {

/// A part of a prompt, encoded by itself: no merge crosses its borders.
struct TextSegment {
  std::string text;
  bool special = false;  // names of special tokens in it become their ids; false for everything that a user wrote
  bool trained = false;  // the model's own words and what closes them: tokens that a loss counts

  bool operator==(const TextSegment&) const = default;
};

struct EncodedSegments {
  std::vector<int64_t> ids;
  std::vector<bool> trained;  // [ids]
};

class Tokenizer {
 public:
  /// A rank file, or a folder holding "tiktoken.model"; the tokenizer_config.json beside it names the reserved ids
  /// (256 nameless ones but [BOS], [EOS], ... when there is none). FormatError names file and line.
  static Tokenizer load(const std::filesystem::path& file_or_folder);
  /// The same from text. `config` is the text of a tokenizer_config.json, or empty.
  static Tokenizer from_text(std::string_view ranks, const std::string& name, std::string_view config = {});

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// Ordinary text only: special tokens are never matched in it. Invalid UTF-8 is encoded byte by byte.
  std::vector<int64_t> encode(std::string_view text) const;
  /// Names of special tokens in `text` become their ids. For text of the program's own making only.
  std::vector<int64_t> encode_with_special(std::string_view text) const;
  /// The ids of all segments, end to end.
  EncodedSegments encode_segments(const std::vector<TextSegment>& segments) const;
  /// The bytes of all tokens; of special ones, their names. UsageError when an id is out of range.
  std::string decode(const std::vector<int64_t>& ids) const;
  /// The bytes of the ordinary tokens; special ones are left out.
  std::string decode_ordinary(const std::vector<int64_t>& ids) const;
  /// The bytes of one token. UsageError when out of range.
  std::string_view token_bytes(int64_t id) const;
  /// Ranks plus reserved special ids.
  int64_t vocab_size() const;
  int64_t num_ranks() const;
  bool is_special(int64_t id) const { return id >= num_ranks(); }
  /// The id of a special token, e.g. "<|sep|>".
  std::optional<int64_t> special_id(std::string_view name) const;
  /// Id that ends a document: that of "[EOS]", see special_tokens.h. FormatError when there is none.
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
