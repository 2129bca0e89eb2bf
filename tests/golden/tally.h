#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "tests/support/golden.h"

namespace furlong::golden {

/// Counts how many of a list of cases hold, so that one line stands for hundreds.
class Tally {
 public:
  explicit Tally(std::string what) : what_(std::move(what)) {}
  void add(bool holds, const std::string& detail) {
    ++count_;
    if (!holds && first_fault_.empty()) first_fault_ = detail.empty() ? "(empty text)" : detail;
  }
  void report(Case& test) const {
    test.expect(what_ + ": " + std::to_string(count_) + " cases", count_ > 0 && first_fault_.empty(), first_fault_);
  }

 private:
  std::string what_;
  int64_t count_ = 0;
  std::string first_fault_;
};

}  // namespace furlong::golden
