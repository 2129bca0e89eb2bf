#include "furlong/tokenizer/bpe.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <queue>
#include <utility>

namespace furlong {

namespace {

constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();
// Up to here a scan for the lowest rank is faster than a heap (measured: they cross between 60 and 120 bytes).
constexpr size_t kMaxScannedBytes = 80;

uint64_t hash_bytes(std::string_view bytes) {
  uint64_t hash = 0x9e3779b97f4a7c15u ^ bytes.size();
  const char* data = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, data += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data, 8);
    hash = (hash ^ word) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  uint64_t word = 0;
  std::memcpy(&word, data, left);
  hash = (hash ^ word) * 0xff51afd7ed558ccdu;
  return hash ^ hash >> 32;
}

int32_t rank_or_none(const RankTable& ranks, std::string_view bytes) {
  const int32_t rank = ranks.find(bytes);
  return rank < 0 ? kNoRank : rank;
}

/// Short pieces: the borders of the parts in an array, the rank of each part with its right neighbour beside it.
void encode_by_scan(const RankTable& ranks, std::string_view piece, std::vector<int64_t>& out) {
  std::array<uint32_t, kMaxScannedBytes + 1> starts;
  std::array<int32_t, kMaxScannedBytes + 1> pair_ranks;
  size_t parts = piece.size();
  const auto pair_rank = [&](size_t part) {
    return part + 1 < parts ? rank_or_none(ranks, piece.substr(starts[part], starts[part + 2] - starts[part]))
                            : kNoRank;
  };
  for (size_t i = 0; i <= parts; ++i) starts[i] = static_cast<uint32_t>(i);
  for (size_t i = 0; i < parts; ++i) pair_ranks[i] = pair_rank(i);
  while (parts > 1) {
    const size_t best = std::min_element(pair_ranks.begin(), pair_ranks.begin() + parts) - pair_ranks.begin();
    if (pair_ranks[best] == kNoRank) break;
    std::copy(starts.begin() + best + 2, starts.begin() + parts + 1, starts.begin() + best + 1);
    std::copy(pair_ranks.begin() + best + 2, pair_ranks.begin() + parts, pair_ranks.begin() + best + 1);
    --parts;
    pair_ranks[best] = pair_rank(best);
    if (best > 0) pair_ranks[best - 1] = pair_rank(best - 1);
  }
  for (size_t i = 0; i < parts; ++i) out.push_back(ranks.find(piece.substr(starts[i], starts[i + 1] - starts[i])));
}

/// Long pieces: parts in a linked list, candidate pairs in a heap; a candidate whose parts have changed is dropped when
/// it comes up.
void encode_by_heap(const RankTable& ranks, std::string_view piece, std::vector<int64_t>& out) {
  struct Part {
    size_t end, previous;  // end == 0: merged into the part before
  };
  struct Candidate {
    int32_t rank;
    size_t begin, end;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : begin > other.begin;
    }
  };
  const size_t size = piece.size();
  std::vector<Part> parts(size);
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto consider = [&](size_t begin) {
    const size_t middle = parts[begin].end;
    if (middle >= size) return;
    const size_t end = parts[middle].end;
    const int32_t rank = rank_or_none(ranks, piece.substr(begin, end - begin));
    if (rank != kNoRank) queue.push({rank, begin, end});
  };
  for (size_t i = 0; i < size; ++i) parts[i] = {i + 1, i == 0 ? 0 : i - 1};
  for (size_t i = 0; i < size; ++i) consider(i);
  while (!queue.empty()) {
    const auto [rank, begin, end] = queue.top();
    queue.pop();
    const size_t middle = parts[begin].end;
    // Parts only grow, so a pair is still the one considered when its far border is.
    if (middle == 0 || middle >= size || parts[middle].end != end) continue;
    parts[begin].end = end;
    parts[middle].end = 0;
    if (end < size) parts[end].previous = begin;
    consider(begin);
    if (begin > 0) consider(parts[begin].previous);
  }
  for (size_t i = 0; i < size; i = parts[i].end) out.push_back(ranks.find(piece.substr(i, parts[i].end - i)));
}

}  // namespace

size_t RankTable::slot_of(std::string_view key) const {
  size_t slot = hash_bytes(key) & (slots_.size() - 1);
  while (slots_[slot] != kEmpty && bytes(slots_[slot]) != key) slot = (slot + 1) & (slots_.size() - 1);
  return slot;
}

int32_t RankTable::find(std::string_view bytes) const {
  return slots_[slot_of(bytes)];
}

bool RankTable::add(std::string_view key) {
  if (find(key) != kEmpty) return false;
  arena_ += key;
  starts_.push_back(arena_.size());
  if (static_cast<size_t>(size()) * 2 <= slots_.size()) {
    slots_[slot_of(key)] = static_cast<int32_t>(size() - 1);
    return true;
  }
  slots_.assign(slots_.size() * 2, kEmpty);
  for (int64_t rank = 0; rank < size(); ++rank) slots_[slot_of(bytes(rank))] = static_cast<int32_t>(rank);
  return true;
}

void bpe_encode(const RankTable& ranks, std::string_view piece, std::vector<int64_t>& out) {
  if (piece.empty()) return;
  if (const int32_t rank = ranks.find(piece); rank >= 0) {
    out.push_back(rank);
  } else if (piece.size() <= kMaxScannedBytes) {
    encode_by_scan(ranks, piece, out);
  } else {
    encode_by_heap(ranks, piece, out);
  }
}

}  // namespace furlong
