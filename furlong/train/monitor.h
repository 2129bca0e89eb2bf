#pragma once

// What a step's loss and gradient norm say about it.

#include <cstdint>
#include <deque>
#include <string>

#include "furlong/base/json.h"
#include "furlong/train/config.h"

namespace furlong {

struct Verdict {
  enum class Kind { kOk, kSpike, kSkip };  // kSpike: taken, and marked
  Kind kind = Kind::kOk;
  std::string reason;

  bool take() const { return kind != Kind::kSkip; }
  const char* name() const;
};

/// The last finite values of one quantity.
class SpikeWindow {
 public:
  explicit SpikeWindow(int64_t size) : size_(size) {}

  void add(double value);
  int64_t count() const { return static_cast<int64_t>(values_.size()); }
  /// mean + sigma * standard deviation. Two passes over the values in order, so that a restored window gives the same
  /// bits.
  double limit(double sigma) const;

  Json state() const;
  void restore(const Json& state, const std::string& where);

 private:
  int64_t size_;
  std::deque<double> values_;
};

class Monitor {
 public:
  explicit Monitor(const MonitorConfig& config) : config_(config), loss_(config.window), grad_norm_(config.window) {}

  /// `fault`: why the forward pass could not finish; empty if it did. Finite values enter the windows.
  Verdict judge(double loss, double grad_norm, const std::string& fault);

  Json state() const;
  void restore(const Json& state, const std::string& where);

 private:
  MonitorConfig config_;
  SpikeWindow loss_, grad_norm_;
};

}  // namespace furlong
