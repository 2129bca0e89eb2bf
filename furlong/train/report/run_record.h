#pragma once

// What a run left behind, read with every value checked: the input of the report.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "furlong/model/config.h"

namespace furlong::report {

/// Mean loss of the targets whose input token stands in [first[i], first[i + 1]) of its document piece.
struct PositionLoss {
  std::vector<double> first, loss, targets;
};

/// One line of metrics.jsonl. NaN stands for null (a value that was not finite, a layer without the mechanism); lists
/// are empty where the line has no such key.
struct StepRecord {
  int64_t step = 0, stage_index = 0, context = 0;
  std::string stage, verdict, reason;
  double tokens = 0, targets = 0;
  double loss = 0, grad_norm = 0, tokens_per_s = 0, seconds = 0, peak_rss_bytes = 0;
  double max_vio = 0, max_vio_mean = 0;
  std::vector<double> bias_range, decay_saturation;             // per layer
  std::vector<std::vector<double>> load;                        // per layer: tokens of each expert
  std::vector<std::vector<double>> attention_depth, mlp_depth;  // per layer: weight of each source
  std::vector<double> output_depth;
  std::optional<PositionLoss> position_loss;
};

struct EvalRecord {
  double bits_per_byte = 0;
  std::optional<double> nats_per_token, bytes;
  std::optional<PositionLoss> position_loss;
};

struct Baselines {
  double bytes = 0, gzip_bits_per_byte = 0, xz_bits_per_byte = 0;
};

struct Sample {
  std::string prompt, text;
  std::optional<double> temperature;
};

struct RunRecord {
  std::string name;
  std::optional<ModelConfig> model;  // config.toml
  std::optional<double> clip;
  std::vector<StepRecord> steps;  // metrics.jsonl
  std::optional<EvalRecord> eval;
  std::optional<Baselines> baselines;
  std::vector<Sample> samples;  // samples.jsonl
};

/// Reads what is there of config.toml, metrics.jsonl, eval.json, baselines.json and samples.jsonl. FormatError names
/// file and line of a value that is not what it should be; IoError if the folder holds none of these.
RunRecord read_run(const std::filesystem::path& folder);

}  // namespace furlong::report
