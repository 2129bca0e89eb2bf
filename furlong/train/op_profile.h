#pragma once

// Where the time of a region goes: own time (without the ops called inside) of every operator that the dispatcher sees.

#include <cstdint>
#include <string>
#include <vector>

namespace furlong {

struct OpTime {
  std::string name;
  int64_t calls = 0;
  double seconds = 0.0;
};

/// Records the operators called by this thread while it lives. One at a time.
class OpProfile {
 public:
  OpProfile();
  ~OpProfile();
  OpProfile(const OpProfile&) = delete;
  OpProfile& operator=(const OpProfile&) = delete;

  /// Longest first.
  std::vector<OpTime> times() const;

 private:
  uint64_t handle_;
};

}  // namespace furlong
