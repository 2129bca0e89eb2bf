#pragma once

// A run: stages, steps, metrics, checkpoints, and going on from them.

#include <filesystem>
#include <functional>
#include <memory>

#include "furlong/base/clock.h"
#include "furlong/data/loader.h"
#include "furlong/model/decoder.h"
#include "furlong/optim/optimizer.h"
#include "furlong/train/checkpoints.h"
#include "furlong/train/config.h"
#include "furlong/train/metrics.h"
#include "furlong/train/monitor.h"
#include "furlong/train/progress.h"
#include "furlong/train/stages.h"
#include "furlong/train/train_state.h"

namespace furlong {

struct TrainOptions {
  std::filesystem::path out;
  bool resume = false;
  std::function<bool()> should_stop = [] { return false; };      // asked after each step
  std::function<void(const StepMetrics&)> after_step = nullptr;  // told of each step once its record is written
};

enum class TrainEnd { kFinished, kStopped };

class Trainer {
 public:
  /// Opens the data, builds the model and makes the run folder, or continues what is there. UsageError when there is a
  /// run in the folder and `resume` is false.
  Trainer(TrainConfig config, TrainOptions options, Progress& progress);

  /// Trains to the end or until should_stop, and saves there. kStopped: `resume` goes on.
  TrainEnd run();

  const Decoder& decoder() const { return decoder_; }
  const TrainState& state() const { return state_; }

 private:
  void refuse_if_occupied() const;
  void resume();
  void load_checkpoint(const TrainState& saved, const std::filesystem::path& folder);
  void check_agrees(const TrainState& saved) const;
  void enter_stage(int64_t stage);
  std::vector<Batch> next_batches();
  StepMetrics step();
  void save();

  TrainConfig config_;
  TrainOptions options_;
  Progress& progress_;
  StagePlan plan_;
  Checkpoints checkpoints_;
  Decoder decoder_;
  std::unique_ptr<Optimizer> optimizer_;
  Monitor monitor_;
  TrainState state_;
  std::unique_ptr<Loader> loader_;
  int64_t stage_ = -1;  // of loader_
  int64_t saved_step_ = -1;
  std::unique_ptr<MetricsFile> metrics_;
  Stopwatch clock_;
};

}  // namespace furlong
