#pragma once

// Byte-pair merging by rank: of all neighbours whose bytes together are a token, the pair of lowest rank merges first,
// the leftmost of equals.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace furlong {

/// Tokens by rank, and ranks by bytes. Holds all 256 single bytes once complete, so that any text can be encoded.
class RankTable {
 public:
  RankTable() : slots_(1024, kEmpty) {}

  /// Gives `bytes` the next rank. False when they are in the table already.
  bool add(std::string_view bytes);
  /// The rank of `bytes`, or -1.
  int32_t find(std::string_view bytes) const;

  int64_t size() const { return static_cast<int64_t>(starts_.size()) - 1; }
  std::string_view bytes(int64_t rank) const {
    return std::string_view(arena_).substr(starts_[rank], starts_[rank + 1] - starts_[rank]);
  }

 private:
  static constexpr int32_t kEmpty = -1;
  size_t slot_of(std::string_view bytes) const;

  std::string arena_;                 // the bytes of all tokens, end to end
  std::vector<size_t> starts_ = {0};  // [ranks + 1]
  std::vector<int32_t> slots_;        // open addressing, a power of two, at most half full
};

/// Appends the ranks of one pre-token. O(n log n) for long ones.
void bpe_encode(const RankTable& ranks, std::string_view piece, std::vector<int64_t>& out);

}  // namespace furlong
