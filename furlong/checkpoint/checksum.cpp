#include "furlong/checkpoint/checksum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "furlong/base/parallel.h"
#include "furlong/base/rng.h"

namespace furlong {

namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;  // hashed by one thread
constexpr size_t kLanes = 8;                     // independent multiplication chains keep the multiplier busy
constexpr uint64_t kPrime = 0x9e3779b185ebca87u;

/// FNV-1a over words instead of bytes, with a rotation so that high bits reach low ones. Each step is a bijection of
/// the lane, so a changed word cannot be forgotten.
uint64_t absorb(uint64_t lane, uint64_t word) {
  return std::rotl(lane ^ word, 29) * kPrime;
}

uint64_t piece_checksum(const std::byte* bytes, size_t size) {
  std::array<uint64_t, kLanes> lanes;
  for (size_t i = 0; i < kLanes; ++i) lanes[i] = mix64(i);
  constexpr size_t kStride = kLanes * sizeof(uint64_t);
  size_t at = 0;
  for (; at + kStride <= size; at += kStride) {
    std::array<uint64_t, kLanes> words;
    std::memcpy(words.data(), bytes + at, kStride);
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = absorb(lanes[i], words[i]);
  }
  if (at < size) {
    std::array<uint64_t, kLanes> words = {};
    std::memcpy(words.data(), bytes + at, size - at);
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = absorb(lanes[i], words[i]);
  }
  uint64_t result = mix64(size);
  for (const uint64_t lane : lanes) result = mix64(result ^ lane);
  return result;
}

}  // namespace

uint64_t checksum64(std::span<const std::byte> bytes) {
  const size_t pieces = (bytes.size() + kPieceBytes - 1) / kPieceBytes;
  std::vector<uint64_t> checksums(pieces);
  parallel_for(0, static_cast<int64_t>(pieces), 4, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      const size_t begin = static_cast<size_t>(piece) * kPieceBytes;
      checksums[piece] = piece_checksum(bytes.data() + begin, std::min(kPieceBytes, bytes.size() - begin));
    }
  });
  uint64_t result = mix64(bytes.size());
  for (const uint64_t checksum : checksums) result = mix64(result ^ checksum);
  return result;
}

std::string checksum_text(uint64_t checksum) {
  std::string text(16, '0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = "0123456789abcdef"[checksum >> (60 - 4 * i) & 15];
  return text;
}

}  // namespace furlong
