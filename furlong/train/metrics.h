#pragma once

// The record of one optimizer step, and the file that keeps the records. Keys: README.md in this folder.

#include <cstdint>
#include <filesystem>
#include <string>

#include "furlong/base/json.h"
#include "furlong/train/step.h"

namespace furlong {

struct StepMetrics {
  int64_t step = 0;  // 1-based
  std::string stage;
  int64_t stage_index = 0;
  int64_t context = 0;
  int64_t tokens_total = 0;
  double lr = 0.0;
  StepOutcome outcome;
  double seconds = 0.0, elapsed = 0.0;
  bool detail = false;

  double max_violation() const;  // largest over the layers; 0 without routers
  OrderedJson to_json() const;
};

/// A JSON-lines file. Each line is written whole by one call and never rewritten.
class MetricsFile {
 public:
  /// Opens for appending. IoError names the file.
  explicit MetricsFile(std::filesystem::path path);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  /// On failure (a full disk) the part of the line that was written is taken back.
  void append(const OrderedJson& record);
  void sync();

  /// Drops the records after `last_step` and a torn last line. Returns the number of records kept. FormatError when a
  /// record in the middle is damaged or out of order.
  static int64_t cut(const std::filesystem::path& path, int64_t last_step);

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
};

}  // namespace furlong
