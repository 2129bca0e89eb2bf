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
  RankTable() : slots_(1024), filter_(1024 / 8), pairs_(1 << 16, kEmpty), bytes_(256, kEmpty) {}

  /// Gives `bytes` the next rank. False when they are in the table already.
  bool add(std::string_view bytes);
  /// The rank of `bytes`, or -1.
  int32_t find(std::string_view bytes) const;
  int32_t find_byte(char byte) const { return bytes_[static_cast<unsigned char>(byte)]; }
  /// The rank of two bytes, or -1: most of a merge's first questions, without hashing.
  int32_t find_pair(char first, char second) const { return pairs_[pair_index(first, second)]; }

  int64_t size() const { return static_cast<int64_t>(starts_.size()) - 1; }
  std::string_view bytes(int64_t rank) const {
    return std::string_view(arena_).substr(starts_[rank], starts_[rank + 1] - starts_[rank]);
  }

 private:
  static constexpr int32_t kEmpty = -1;
  struct Slot {
    int32_t rank = kEmpty;
    uint32_t tag = 0;  // other bits of the hash: a pair that is no token is mostly turned away without reading tokens
  };
  static size_t pair_index(char first, char second) {
    return static_cast<size_t>(static_cast<unsigned char>(first)) << 8 | static_cast<unsigned char>(second);
  }
  /// The slot that holds `bytes`, or the empty one where they belong.
  size_t slot_of(std::string_view bytes, uint64_t hash) const;
  void place(int32_t rank);
  /// Its bit of the filter, from bits of the hash that the slot does not use.
  size_t filter_bit(uint64_t hash) const { return (hash >> 24) & (filter_.size() * 64 - 1); }

  std::string arena_;                 // the bytes of all tokens, end to end
  std::vector<size_t> starts_ = {0};  // [ranks + 1]
  std::vector<Slot> slots_;           // open addressing, a power of two, at most half full
  std::vector<uint64_t> filter_;      // 8 bits a slot: a clear one turns away what is no token, nearer than the slots
  std::vector<int32_t> pairs_;        // [256 * 256]
  std::vector<int32_t> bytes_;        // [256]
  size_t longest_ = 0;                // bytes
};

/// Appends the ranks of one pre-token. O(n log n) for long ones.
void bpe_encode(const RankTable& ranks, std::string_view piece, std::vector<int64_t>& out);

}  // namespace furlong
