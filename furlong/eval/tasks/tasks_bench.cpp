// Trains a hybrid of two layers (KDA, then MLA; about 0.1 M parameters) on each tiny task until it answers 0.95 of
// fresh questions, with two seeds, and prints steps, seconds and accuracy. Exit 1 if a run does not get there.
//
//   tasks_bench [TASK ...] [--seeds N] [--steps N]

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/div.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <c10/core/Scalar.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "furlong/base/clock.h"
#include "furlong/base/error.h"
#include "furlong/eval/tasks/task.h"
#include "furlong/model/decoder.h"
#include "furlong/ops/cross_entropy/cross_entropy.h"
#include "furlong/optim/optimizer.h"
#include "furlong/optim/schedule.h"

namespace furlong::eval {
namespace {

constexpr int64_t kRows = 32, kEvalRows = 128, kEvalEvery = 50;
constexpr double kWanted = 0.95;
constexpr uint64_t kTrainSeed = 1000, kEvalSeed = 2000;

ModelConfig model_for(const Task& task) {
  ModelConfig config;
  config.vocab_size = task.vocab_size();
  config.hidden_size = 64;
  config.num_layers = 2;
  config.full_attention_layers = {2};
  config.intermediate_size = 128;
  config.init_std = 0.1;  // about 1 / sqrt(hidden size)
  config.kda = {.heads = 2, .head_size = 32, .gate_lower_bound = -5.0, .full_rank_gate = true};
  config.mla = {.heads = 2,
                .kv_lora_rank = 32,
                .qk_nope_head_dim = 32,
                .qk_rope_head_dim = 16,
                .v_head_dim = 32,
                .output_gate = true};
  config.validate("tasks_bench");
  return config;
}

struct Rows {
  at::Tensor tokens_N, targets_N, weight_N;
  SequenceLayout layout;
  double questions = 0;
};

Rows make_rows(const Task& task, uint64_t seed, uint64_t first, int64_t count) {
  std::vector<int64_t> tokens, targets;
  std::vector<float> weight;
  double questions = 0;
  for (int64_t row = 0; row < count; ++row) {
    const TaskItem item = task.item(seed, first + static_cast<uint64_t>(row));
    tokens.insert(tokens.end(), item.tokens.begin(), item.tokens.end());
    for (const int64_t target : item.targets) {
      targets.push_back(target == kNoTarget ? 0 : target);
      weight.push_back(target == kNoTarget ? 0.0f : 1.0f);
      questions += weight.back();
    }
  }
  const auto size = static_cast<int64_t>(tokens.size());
  return {at::from_blob(tokens.data(), {size}, at::kLong).clone(),
          at::from_blob(targets.data(), {size}, at::kLong).clone(),
          at::from_blob(weight.data(), {size}, at::kFloat).clone(),
          SequenceLayout::from_lengths(std::vector<int64_t>(static_cast<size_t>(count), task.length())), questions};
}

double accuracy(const Decoder& decoder, const Rows& rows) {
  const at::NoGradGuard no_grad;
  const at::Tensor hidden = decoder.forward(rows.tokens_N, rows.layout, nullptr, {});
  const at::Tensor right = decoder.logits(hidden).argmax(-1).eq(rows.targets_N).to(at::kFloat);
  return right.mul(rows.weight_N).sum().item().toDouble() / rows.questions;
}

struct Outcome {
  int64_t steps = 0;
  double seconds = 0, accuracy = 0;
};

Outcome train(const Task& task, uint64_t seed, int64_t max_steps) {
  Decoder decoder(model_for(task));
  decoder.initialize(seed, at::kFloat, at::kCPU, true);
  OptimizerConfig config;
  config.use_muon = false;
  config.adamw.weight_decay = 0.01;
  Optimizer optimizer(decoder.params(), config);
  const Schedule schedule{.kind = "constant", .peak_lr = 3e-3};
  const Rows fresh = make_rows(task, kEvalSeed, 0, kEvalRows);
  const Stopwatch clock;
  Outcome outcome;
  while (outcome.steps < max_steps && outcome.accuracy < kWanted) {
    const Rows rows = make_rows(task, kTrainSeed + seed, static_cast<uint64_t>(outcome.steps * kRows), kRows);
    const at::Tensor hidden = decoder.forward(rows.tokens_N, rows.layout, nullptr, {.training = true});
    const auto [loss, nll] =
        linear_cross_entropy(hidden, decoder.head_weight(), rows.targets_N, rows.weight_N.div(rows.questions));
    loss.backward();
    clip_grad_norm(decoder.params(), 1.0);
    optimizer.step(schedule.lr(outcome.steps, max_steps));
    optimizer.zero_grad();
    if (++outcome.steps % kEvalEvery == 0) outcome.accuracy = accuracy(decoder, fresh);
  }
  outcome.seconds = clock.seconds();
  return outcome;
}

int64_t count_parameters(const Task& task) {
  int64_t total = 0;
  const Decoder decoder(model_for(task));
  for (const Param& param : decoder.params()) total += param.spec.numel();
  return total;
}

int run(const std::vector<std::string>& names, int64_t seeds, int64_t max_steps) {
  at::set_num_threads(1);  // products this small lose more to waiting than they win
  int passed = 0, runs = 0;
  std::string summary;
  std::printf("%-6s %5s %11s %6s %8s %9s %7s %9s\n", "task", "seed", "parameters", "steps", "seconds", "accuracy",
              "chance", "shortcut");
  for (const std::string& name : names) {
    const auto task = make_tiny_task(name);
    for (int64_t seed = 0; seed < seeds; ++seed) {
      const Outcome outcome = train(*task, static_cast<uint64_t>(seed), max_steps);
      std::printf("%-6s %5lld %11lld %6lld %8.1f %9.3f %7.3f %9.3f\n", name.c_str(), static_cast<long long>(seed),
                  static_cast<long long>(count_parameters(*task)), static_cast<long long>(outcome.steps),
                  outcome.seconds, outcome.accuracy, task->chance(), task->shortcut());
      std::fflush(stdout);
      char text[64];
      std::snprintf(text, sizeof text, "%s%s %.3f in %lld steps", summary.empty() ? "" : ", ", name.c_str(),
                    outcome.accuracy, static_cast<long long>(outcome.steps));
      summary += text;
      ++runs;
      if (outcome.accuracy >= kWanted) ++passed;
    }
  }
  std::printf("%d of %d runs reach %.2f: %s\n", passed, runs, kWanted, summary.c_str());
  return passed == runs ? 0 : 1;
}

}  // namespace
}  // namespace furlong::eval

int main(int argc, char** argv) {
  std::vector<std::string> names;
  int64_t seeds = 2, steps = 3000;
  try {
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      if ((word == "--seeds" || word == "--steps") && i + 1 < argc) {
        (word == "--seeds" ? seeds : steps) = std::stoll(argv[++i]);
      } else {
        names.push_back(word);
      }
    }
    if (names.empty()) names = furlong::eval::tiny_task_names();
    return furlong::eval::run(names, seeds, steps);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tasks_bench: %s\n", error.what());
    return 2;
  }
}
