#include "furlong/train/trainer.h"

#include <c10/core/Device.h>
#include <fmt/format.h>

#include <utility>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/parallel.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/model/weights.h"
#include "furlong/ops/moe/layer.h"
#include "furlong/train/machine_limits.h"
#include "furlong/train/run_data.h"

namespace furlong {

namespace fs = std::filesystem;

namespace {

constexpr const char* kOptimizerStem = "optimizer";

NamedTensors read_moments(const fs::path& folder) {
  const CheckpointReader reader(folder / fmt::format("{}.safetensors", kOptimizerStem));
  NamedTensors moments;
  for (const std::string& name : reader.names()) moments.emplace_back(name, reader.tensor(name));
  return moments;
}

}  // namespace

Trainer::Trainer(TrainConfig config, TrainOptions options, Progress& progress)
    : config_(std::move(config)),
      options_(std::move(options)),
      progress_(progress),
      plan_(config_.stages),
      checkpoints_(options_.out, config_.checkpoint.keep),
      decoder_(config_.model),
      monitor_(config_.monitor) {
  if (!options_.resume) refuse_if_occupied();
  check_machine(config_);
  state_.config = config_.resolved();
  state_.data = describe_data(config_);
  state_.threads = num_threads();
  state_.version = FURLONG_VERSION;
  decoder_.initialize(static_cast<uint64_t>(config_.seed), at::kFloat, c10::Device(config_.device), true);
  if (config_.compute == "bf16") decoder_.set_compute_dtype(at::kBFloat16);
  for (MoeLayer* layer : decoder_.moe_layers()) {
    if (layer != nullptr && config_.balance.kind == "quantile") layer->enable_balancing(config_.balance.bins);
  }
  optimizer_ = std::make_unique<Optimizer>(decoder_.params(), config_.optimizer);
  make_folders(options_.out);
  if (options_.resume) resume();
  const int64_t records = MetricsFile::cut(options_.out / "metrics.jsonl", state_.step);
  if (records < state_.step) {
    throw FormatError(fmt::format("{}: holds {} records, the checkpoint is of step {}",
                                  (options_.out / "metrics.jsonl").string(), records, state_.step));
  }
  metrics_ = std::make_unique<MetricsFile>(options_.out / "metrics.jsonl");
  write_file_atomic(options_.out / "config.toml", config_.to_toml());
}

void Trainer::refuse_if_occupied() const {
  if (!fs::exists(options_.out / "metrics.jsonl") && checkpoints_.steps().empty()) return;
  throw UsageError(fmt::format("{}: holds a run already; add --resume to go on with it, or choose another --out",
                               options_.out.string()));
}

void Trainer::resume() {
  checkpoints_.remove_leftovers();
  std::vector<int64_t> damaged;
  for (const int64_t step : checkpoints_.steps()) {
    const fs::path folder = checkpoints_.path(step);
    try {
      const TrainState saved = read_train_state(folder);
      check_agrees(saved);
      load_checkpoint(saved, folder);
    } catch (const FormatError& error) {
      progress_.message(fmt::format("{} is damaged: {}", folder.string(), error.what()));
      damaged.push_back(step);
      continue;
    }
    for (const int64_t bad : damaged) {
      progress_.message(fmt::format("set aside as {}", checkpoints_.set_aside(bad).string()));
    }
    checkpoints_.point_latest(step);
    progress_.message(fmt::format("going on after step {} from {}", step, folder.string()));
    return;
  }
  if (!damaged.empty()) {
    throw FormatError(fmt::format("{}: no checkpoint is whole; start again with another --out", options_.out.string()));
  }
  progress_.message(fmt::format("{}: no checkpoint yet, starting at the first step", options_.out.string()));
}

void Trainer::check_agrees(const TrainState& saved) const {
  std::string difference = first_difference(saved.config, state_.config);
  if (difference.empty()) difference = first_difference({{"data", saved.data}}, {{"data", state_.data}});
  if (!difference.empty()) {
    throw ConfigError(
        fmt::format("{}: cannot go on with another configuration: {}", options_.out.string(), difference));
  }
  if (saved.threads != state_.threads) {
    progress_.message(fmt::format("{} threads, {} before: sums are taken in another order, the last bits will differ",
                                  state_.threads, saved.threads));
  }
  if (saved.version != state_.version) {
    progress_.message(fmt::format("Furlong {}, {} before: the last bits may differ", state_.version, saved.version));
  }
}

void Trainer::load_checkpoint(const TrainState& saved, const fs::path& folder) {
  load_weights(decoder_, folder);
  optimizer_->load_state(read_moments(folder), saved.optimizer_steps);
  monitor_.restore(saved.monitor, folder.string());
  state_.step = saved.step;
  state_.tokens = saved.tokens;
  state_.optimizer_steps = saved.optimizer_steps;
  state_.cursor = saved.cursor;
  saved_step_ = saved.step;
}

void Trainer::enter_stage(int64_t stage) {
  const StageConfig& config = config_.stages[stage];
  loader_ = std::make_unique<Loader>(config_.sources_of(stage), config.context, static_cast<uint64_t>(config_.seed));
  if (!state_.cursor.is_null()) loader_->restore({state_.cursor});
  stage_ = stage;
  progress_.message(fmt::format("stage {} ({} of {}): context {}, {} rows a step, steps {} to {}", config.name,
                                stage + 1, plan_.num_stages(), config.context, config.rows, plan_.first_step(stage) + 1,
                                plan_.first_step(stage) + plan_.num_steps(stage)));
}

std::vector<Batch> Trainer::next_batches() {
  const StageConfig& stage = config_.stages[stage_];
  const int64_t micro_rows = stage.micro_rows > 0 ? stage.micro_rows : stage.rows;
  std::vector<Batch> batches;
  for (int64_t row = 0; row < stage.rows; row += micro_rows) batches.push_back(loader_->next(micro_rows));
  state_.cursor = loader_->state().values;
  return batches;
}

StepMetrics Trainer::step() {
  const Stopwatch watch;
  const int64_t index = state_.step;
  if (plan_.stage_of(index) != stage_) enter_stage(plan_.stage_of(index));
  StepMetrics metrics;
  metrics.detail = index == 0 || (index + 1) % config_.log.detail_every == 0 || plan_.is_last_of_stage(index);
  metrics.lr = config_.schedule.lr(index, plan_.total_steps());
  StepOptions options;
  options.lr = metrics.lr;
  options.clip = config_.clip;
  options.recompute = config_.recompute;
  options.position_loss = metrics.detail;
  metrics.outcome = take_step(decoder_, *optimizer_, monitor_, next_batches(), options);
  state_.step = index + 1;
  state_.tokens += metrics.outcome.tokens;
  state_.optimizer_steps = optimizer_->num_steps();
  metrics.step = state_.step;
  metrics.stage = config_.stages[stage_].name;
  metrics.stage_index = stage_;
  metrics.context = config_.stages[stage_].context;
  metrics.tokens_total = state_.tokens;
  metrics.seconds = watch.seconds();
  metrics.elapsed = clock_.seconds();
  return metrics;
}

TrainEnd Trainer::run() {
  clock_.restart();
  progress_.start(state_.step, plan_.total_steps(), plan_.total_tokens());
  TrainEnd end = TrainEnd::kFinished;
  while (state_.step < plan_.total_steps()) {
    const StepMetrics metrics = step();
    metrics_->append(metrics.to_json());
    progress_.step(metrics);
    if (!metrics.outcome.verdict.reason.empty()) {
      progress_.message(
          fmt::format("step {}: {}: {}", metrics.step, metrics.outcome.verdict.name(), metrics.outcome.verdict.reason));
    }
    if (options_.after_step) options_.after_step(metrics);
    if (options_.should_stop() && state_.step < plan_.total_steps()) {
      end = TrainEnd::kStopped;
      break;
    }
    const int64_t every = config_.checkpoint.every_steps;
    if ((every > 0 && state_.step % every == 0) || plan_.is_last_of_stage(state_.step - 1)) save();
  }
  save();
  progress_.finish();
  return end;
}

void Trainer::save() {
  if (saved_step_ == state_.step) return;
  metrics_->sync();
  state_.monitor = monitor_.state();
  checkpoints_.save(state_.step, [&](const fs::path& folder) {
    save_weights(decoder_, folder, at::kFloat);
    write_tensors(folder / fmt::format("{}.safetensors", kOptimizerStem), optimizer_->state());
    copy_tokenizer(config_, folder);
    write_train_state(folder, state_);
  });
  saved_step_ = state_.step;
}

}  // namespace furlong
