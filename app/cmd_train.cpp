#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "app/commands.h"
#include "furlong/base/log.h"
#include "furlong/train/config.h"
#include "furlong/train/trainer.h"

namespace furlong::app {

namespace {

volatile std::sig_atomic_t stop_signal = 0;

/// The first signal stops the run after the step; the second ends the program at once.
void on_signal(int number) {
  stop_signal = number;
  std::signal(number, SIG_DFL);
}

struct Arguments {
  std::string config, out;
  bool resume = false;
  std::vector<std::string> assignments;
};

int train(const Arguments& arguments) {
  TrainConfig config = TrainConfig::load(arguments.config, arguments.assignments);
  if (config.threads > 0) at::set_num_threads(static_cast<int>(config.threads));
  Progress progress(stderr, stderr_is_terminal(), config.log.every_steps);
  TrainOptions options;
  options.out = arguments.out;
  options.resume = arguments.resume;
  options.should_stop = [] { return stop_signal != 0; };
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  Trainer trainer(std::move(config), std::move(options), progress);
  if (trainer.run() == TrainEnd::kFinished) {
    say(fmt::format("finished after step {} and saved in {}", trainer.state().step, arguments.out));
    return 0;
  }
  say(fmt::format("stopped after step {} and saved; `furlong train {} --out {} --resume` goes on", trainer.state().step,
                  arguments.config, arguments.out));
  return 128 + stop_signal;
}

}  // namespace

void add_train(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("train", "Train a model through the stages of a config");
  command->add_option("config", arguments->config, "TOML file, see configs/demo.toml")->required();
  command->add_option("--out", arguments->out, "Folder of the run: checkpoints/, metrics.jsonl, config.toml")
      ->required();
  command->add_flag("--resume", arguments->resume, "Go on from the newest whole checkpoint in --out");
  command->add_option("--set", arguments->assignments, "Override a key: --set schedule.peak_lr=1e-3 (repeatable)")
      ->allow_extra_args(false);
  command->footer(
      "Examples:\n"
      "  furlong train configs/demo.toml --out out/demo/run\n"
      "  furlong train configs/demo.toml --out out/demo/run --resume\n"
      "  furlong train configs/demo.toml --out out/short --set stages.0.tokens=100000 --set compute=fp32");
  command->callback([arguments, &exit_code] { exit_code = train(*arguments); });
}

}  // namespace furlong::app
