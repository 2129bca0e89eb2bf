#pragma once

// Counter-based random numbers: a value depends on (seed, stream, counter) alone, so a cursor of three integers is the
// whole state, streams are independent, and any thread can draw any value. SplitMix64's finaliser over a keyed counter
// (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).

#include <cmath>
#include <cstdint>
#include <numbers>

namespace furlong {

inline uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Rng {
 public:
  explicit Rng(uint64_t seed, uint64_t stream = 0, uint64_t counter = 0)
      : key_(mix64(seed ^ mix64(stream + 0x632be59bd9b4e019u))), counter_(counter) {}

  uint64_t next() { return mix64(key_ ^ mix64(counter_++)); }
  /// Uniform in [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  /// Uniform integer in [0, bound), bound > 0.
  uint64_t below(uint64_t bound) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(next()) * bound) >> 64);
  }
  /// Standard normal (Box-Muller, one of the pair).
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }
  uint64_t counter() const { return counter_; }

 private:
  uint64_t key_;
  uint64_t counter_;
};

}  // namespace furlong
