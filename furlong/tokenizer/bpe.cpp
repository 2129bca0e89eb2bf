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

template <typename Word>
uint64_t load(const char* data) {
  Word word;
  std::memcpy(&word, data, sizeof(Word));
  return word;
}

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0xff51afd7ed558ccdu;
  return hash ^ hash >> 32;
}

/// Words of 8 bytes, the last one overlapping; short keys by loads of fixed size, which cost less than a loop.
uint64_t hash_bytes(std::string_view bytes) {
  const uint64_t hash = 0x9e3779b97f4a7c15u ^ bytes.size();
  const char* data = bytes.data();
  const size_t size = bytes.size();
  if (size >= 8) {
    uint64_t mixed = hash;
    for (size_t at = 0; at + 8 < size; at += 8) mixed = mix(mixed, load<uint64_t>(data + at));
    return mix(mixed, load<uint64_t>(data + size - 8));
  }
  if (size >= 4) return mix(hash, load<uint32_t>(data) | load<uint32_t>(data + size - 4) << 32);
  if (size >= 2) return mix(hash, load<uint16_t>(data) | load<uint16_t>(data + size - 2) << 16);
  return mix(hash, size == 1 ? load<uint8_t>(data) : 0);
}

int32_t or_none(int32_t rank) {
  return rank < 0 ? kNoRank : rank;
}

/// Index of the first of the smallest. The smallest alone first: a reduction that the compiler turns into vectors.
size_t first_smallest(const int32_t* values, size_t count) {
  int32_t smallest = values[0];
  for (size_t i = 1; i < count; ++i) smallest = std::min(smallest, values[i]);
  return std::find(values, values + count, smallest) - values;
}

/// Short pieces: the borders of the parts in an array, the rank of each part with its right neighbour beside it.
void encode_by_scan(const RankTable& ranks, std::string_view piece, std::vector<int64_t>& out) {
  std::array<uint32_t, kMaxScannedBytes + 1> starts;
  std::array<int32_t, kMaxScannedBytes + 1> pair_ranks;
  std::array<int32_t, kMaxScannedBytes> rank_at;  // of the part that starts at a byte
  size_t parts = piece.size();
  const auto pair_rank = [&](size_t part) {
    return part + 1 < parts ? or_none(ranks.find(piece.substr(starts[part], starts[part + 2] - starts[part])))
                            : kNoRank;
  };
  for (size_t i = 0; i <= parts; ++i) starts[i] = static_cast<uint32_t>(i);
  for (size_t i = 0; i + 1 < parts; ++i) pair_ranks[i] = or_none(ranks.find_pair(piece[i], piece[i + 1]));
  pair_ranks[parts - 1] = kNoRank;
  for (size_t i = 0; i < parts; ++i) rank_at[i] = ranks.find_byte(piece[i]);
  while (parts > 1) {
    const size_t best = first_smallest(pair_ranks.data(), parts);
    if (pair_ranks[best] == kNoRank) break;
    rank_at[starts[best]] = pair_ranks[best];
    std::copy(starts.begin() + best + 2, starts.begin() + parts + 1, starts.begin() + best + 1);
    std::copy(pair_ranks.begin() + best + 2, pair_ranks.begin() + parts, pair_ranks.begin() + best + 1);
    --parts;
    pair_ranks[best] = pair_rank(best);
    if (best > 0) pair_ranks[best - 1] = pair_rank(best - 1);
  }
  for (size_t i = 0; i < parts; ++i) out.push_back(rank_at[starts[i]]);
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
    const int32_t rank = or_none(ranks.find(piece.substr(begin, end - begin)));
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

size_t RankTable::slot_of(std::string_view key, uint64_t hash) const {
  const auto tag = static_cast<uint32_t>(hash >> 32);
  size_t slot = hash & (slots_.size() - 1);
  while (slots_[slot].rank != kEmpty && (slots_[slot].tag != tag || bytes(slots_[slot].rank) != key)) {
    slot = (slot + 1) & (slots_.size() - 1);
  }
  return slot;
}

int32_t RankTable::find(std::string_view bytes) const {
  if (bytes.size() > longest_) return kEmpty;
  const uint64_t hash = hash_bytes(bytes);
  const size_t bit = filter_bit(hash);
  if ((filter_[bit / 64] >> (bit % 64) & 1) == 0) return kEmpty;
  return slots_[slot_of(bytes, hash)].rank;
}

void RankTable::place(int32_t rank) {
  const uint64_t hash = hash_bytes(bytes(rank));
  slots_[slot_of(bytes(rank), hash)] = {rank, static_cast<uint32_t>(hash >> 32)};
  const size_t bit = filter_bit(hash);
  filter_[bit / 64] |= uint64_t{1} << (bit % 64);
}

bool RankTable::add(std::string_view key) {
  if (find(key) != kEmpty) return false;
  const auto rank = static_cast<int32_t>(size());
  arena_ += key;
  starts_.push_back(arena_.size());
  longest_ = std::max(longest_, key.size());
  if (key.size() == 1) bytes_[static_cast<unsigned char>(key[0])] = rank;
  if (key.size() == 2) pairs_[pair_index(key[0], key[1])] = rank;
  if (static_cast<size_t>(size()) * 2 <= slots_.size()) {
    place(rank);
    return true;
  }
  slots_.assign(slots_.size() * 2, {});
  filter_.assign(slots_.size() / 8, 0);
  for (int32_t moved = 0; moved <= rank; ++moved) place(moved);
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
