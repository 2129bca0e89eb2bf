#pragma once

// What `furlong train` reads: every key with its range. configs/demo.toml is a commented example.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "furlong/base/config.h"
#include "furlong/data/loader.h"
#include "furlong/model/config.h"
#include "furlong/optim/optimizer.h"
#include "furlong/optim/schedule.h"

namespace furlong {

struct DataConfig {
  std::vector<SourceConfig> sources;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("sources", sources, {.doc = "folders of token shards, with weights"});
  }
};

/// A part of the run with its own context length and mixture. Its length is `tokens` or `steps`, one of the two.
struct StageConfig {
  std::string name;
  int64_t context = 0;
  std::optional<int64_t> tokens;
  std::optional<int64_t> steps;
  int64_t rows = 0;
  int64_t micro_rows = 0;
  std::vector<double> weights;
  std::vector<SourceConfig> sources;

  int64_t tokens_per_step() const { return rows * context; }

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("name", name, {.doc = "name of the stage, for metrics", .required = true});
    visit("context", context, {.doc = "tokens a row", .min = 2, .max = 1 << 24, .required = true});
    visit("tokens", tokens, {.doc = "tokens to train on, rounded up to whole steps", .min = 1});
    visit("steps", steps, {.doc = "optimizer steps, instead of tokens", .min = 1});
    visit("rows", rows, {.doc = "rows an optimizer step", .min = 1, .max = 1 << 24, .required = true});
    visit("micro_rows", micro_rows, {.doc = "rows a micro-batch, a divisor of rows; 0: all of them", .min = 0});
    visit("weights", weights, {.doc = "weights of the sources in this stage, instead of theirs"});
    visit("sources", sources, {.doc = "this stage's own sources, instead of data.sources"});
  }
};

struct BalanceConfig {
  std::string kind = "quantile";
  int64_t bins = 1000;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("kind", kind, {.doc = "rule of the router's correction bias", .one_of = {"quantile", "none"}});
    visit("bins", bins, {.doc = "bins of the quantile's histogram", .min = 2, .max = 1 << 20});
  }
};

struct CheckpointConfig {
  int64_t every_steps = 200;
  int64_t keep = 2;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("every_steps", every_steps, {.doc = "steps between checkpoints; 0: at the end only", .min = 0});
    visit("keep", keep, {.doc = "newest checkpoints kept", .min = 1, .max = 1 << 20});
  }
};

struct MonitorConfig {
  double sigma = 6.0;
  int64_t window = 128;
  int64_t min_samples = 64;
  std::string on_spike = "skip";

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("sigma", sigma, {.doc = "standard deviations above the mean that make a spike", .min = 0.0, .max = 1e9});
    visit("window", window, {.doc = "finite values that mean and deviation are taken over", .min = 2, .max = 1 << 20});
    visit("min_samples", min_samples, {.doc = "values needed before anything is called a spike", .min = 2});
    visit("on_spike", on_spike, {.doc = "what to do with a spike's step", .one_of = {"skip", "mark"}});
  }
};

struct LogConfig {
  int64_t every_steps = 10;
  int64_t detail_every = 20;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("every_steps", every_steps, {.doc = "steps between lines where there is no terminal", .min = 1});
    visit("detail_every", detail_every, {.doc = "steps between loads, depth weights, loss by position", .min = 1});
  }
};

struct TrainConfig {
  ModelConfig model;         // read apart: key `model` is a path or a table
  OrderedJson model_values;  // as read: a table, or the path of a config.json
  int64_t seed = 0;
  std::string device = "cpu";
  std::string compute = "fp32";
  int64_t threads = 0;
  DataConfig data;
  std::vector<StageConfig> stages;
  Schedule schedule;
  OptimizerConfig optimizer;
  BalanceConfig balance;
  double clip = 1.0;
  bool recompute = false;
  CheckpointConfig checkpoint;
  MonitorConfig monitor;
  LogConfig log;

  /// The sources of a stage with its weights applied.
  std::vector<SourceConfig> sources_of(int64_t stage) const;

  /// Reads a TOML file, with `--set` assignments applied in order. A model path is relative to the file; data paths
  /// are relative to the working folder.
  static TrainConfig load(const std::filesystem::path& path, const std::vector<std::string>& assignments = {});
  static TrainConfig from_document(ConfigDocument document, const std::filesystem::path& folder,
                                   const std::vector<std::string>& assignments = {});
  /// Cross-checks that ranges of single keys cannot say. ConfigError with `where` in front.
  void validate(const std::string& where) const;
  /// Everything, defaults written out; `model` in the published form of config.json.
  OrderedJson resolved() const;
  /// The same as a file that load() reads.
  std::string to_toml() const;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("seed", seed, {.doc = "of the initial weights and of the data's order", .min = 0});
    visit("device", device, {.doc = "\"cpu\", \"cuda\" or \"cuda:N\""});
    visit("compute", compute, {.doc = "precision of activations; masters are fp32", .one_of = {"fp32", "bf16"}});
    visit("threads", threads, {.doc = "0: all cores", .min = 0, .max = 4096});
    visit("data", data, {.doc = "sources of tokens"});
    visit("stages", stages, {.doc = "stages in order", .required = true});
    visit("schedule", schedule, {.doc = "learning rate over all stages"});
    visit("optimizer", optimizer, {.doc = "Muon and AdamW"});
    visit("balance", balance, {.doc = "router balance"});
    visit("clip", clip, {.doc = "largest gradient norm; 0: no clipping", .min = 0.0});
    visit("recompute", recompute, {.doc = "keep only layer inputs for backward: less memory, a third more work"});
    visit("checkpoint", checkpoint, {.doc = "saving"});
    visit("monitor", monitor, {.doc = "spikes"});
    visit("log", log, {.doc = "cadence of output"});
  }
};

/// The first key in which two resolved configurations differ so that a run cannot go on bit by bit ("stages.0.rows: 16
/// in the checkpoint, 8 now"); empty when there is none. Keys that do not change the maths are not compared:
/// checkpoint, log, threads, device, and the folders of data (their content is compared elsewhere).
std::string first_difference(const OrderedJson& saved, const OrderedJson& now);

}  // namespace furlong
