#pragma once

// The reserved ids after the ranks. Their names come from the checkpoint's tokenizer_config.json, never from code: the
// same id means different things in different models. Ids that no file names are "<|reserved_token_ID|>".

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace furlong {

/// Released vocabularies reserve this many ids; so many are assumed when no tokenizer_config.json says otherwise.
constexpr int64_t kReleasedReservedIds = 256;

class SpecialTokens {
 public:
  /// Names of the ids first_id, first_id + 1, ...; an empty one stands for "<|reserved_token_ID|>". UsageError when
  /// two are equal.
  SpecialTokens(int64_t first_id, const std::vector<std::string>& names);
  /// Reads "added_tokens_decoder" of a tokenizer_config.json's text. The block ends with the highest id named there;
  /// where the table leaves ids out it holds kReleasedReservedIds at least. FormatError names `where` and the id that
  /// is malformed, an ordinary rank, or absurdly large.
  static SpecialTokens from_json(std::string_view text, int64_t first_id, const std::string& where);
  /// The block of a newly trained tokenizer: [BOS], [EOS], the four of the prompt format, reserved names, and [UNK] and
  /// [PAD] as the last two. UsageError when `count` is too small to hold them.
  static SpecialTokens standard(int64_t first_id, int64_t count);

  int64_t first_id() const { return first_id_; }
  int64_t count() const { return static_cast<int64_t>(names_.size()); }
  const std::string& name(int64_t id) const { return names_[id - first_id_]; }
  std::optional<int64_t> find(std::string_view name) const;
  /// The token of the longest name that stands in `text` at `at`.
  std::optional<int64_t> match(std::string_view text, size_t at) const;
  /// The text of a tokenizer_config.json that from_json reads back.
  std::string to_json() const;

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view name) const { return std::hash<std::string_view>{}(name); }
  };

  int64_t first_id_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, int64_t, Hash, std::equal_to<>> ids_;
  std::vector<size_t> lengths_by_first_[256];  // of names that start with this byte, longest first
};

}  // namespace furlong
