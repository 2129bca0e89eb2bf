// Training speed at the fixed shape of the acceptance point: hidden 256, 8 layers 3:1, 4 heads of 64, 32 experts, 4
// chosen, expert width 96, vocabulary 2,048, 16 rows of 256 tokens; forward, backward and optimizer step.
//
//   train_bench [--dtype fp32|bf16] [--steps N] [--threads N] [--profile] [--recompute] [--rows N] [--context N]
//
// One JSON line: tokens_per_s (the median step), peak_rss_bytes, seconds of forward + backward and of the step. With
// --profile first a table of the operators by own time.

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/roll.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "furlong/base/clock.h"
#include "furlong/base/error.h"
#include "furlong/base/process.h"
#include "furlong/model/count.h"
#include "furlong/ops/moe/layer.h"
#include "furlong/train/op_profile.h"
#include "furlong/train/step.h"

namespace furlong {
namespace {

struct BenchOptions {
  std::string dtype = "fp32";
  int64_t steps = 5, threads = 0, rows = 16, context = 256;
  bool profile = false, recompute = false;
};

ModelConfig acceptance_model() {
  ModelConfig config;
  config.vocab_size = 2048;
  config.hidden_size = 256;
  config.num_layers = 8;
  config.full_attention_layers = {4, 8};
  config.kda.heads = 4;
  config.kda.head_size = 64;
  config.kda.gate_lower_bound = -5.0;
  config.kda.full_rank_gate = true;
  config.mla.heads = 4;
  config.mla.q_lora_rank = 128;
  config.mla.kv_lora_rank = 64;
  config.mla.qk_nope_head_dim = 64;
  config.mla.qk_rope_head_dim = 32;
  config.mla.v_head_dim = 64;
  config.mla.output_gate = true;
  config.attnres_block_size = 3;
  config.intermediate_size = 768;
  config.moe.num_experts = 32;
  config.moe.experts_per_token = 4;
  config.moe.shared_experts = 1;
  config.moe.expert_size = 96;
  config.moe.latent_size = 128;
  config.moe.latent_norm = true;
  config.activation = "situ";
  config.situ_beta = 4.0;
  config.situ_linear_beta = 25.0;
  return config;
}

Batch random_batch(const BenchOptions& options, int64_t vocab_size) {
  const int64_t tokens = options.rows * options.context;
  Batch batch;
  batch.tokens_N = at::randint(vocab_size, {tokens}, at::kLong);
  batch.targets_N = at::roll(batch.tokens_N, -1);
  batch.weight_N = at::ones({tokens}, at::kFloat);
  batch.layout = SequenceLayout::from_lengths(std::vector<int64_t>(options.rows, options.context));
  batch.num_targets = tokens;
  return batch;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  explicit Bench(const BenchOptions& options)
      : options_(options),
        config_(acceptance_model()),
        decoder_(config_),
        batches_({random_batch(options, config_.vocab_size)}) {
    decoder_.initialize(1, at::kFloat, at::kCPU, true);
    if (options.dtype == "bf16") decoder_.set_compute_dtype(at::kBFloat16);
    for (MoeLayer* layer : decoder_.moe_layers()) {
      if (layer != nullptr) layer->enable_balancing(1000);
    }
    optimizer_.emplace(decoder_.params(), OptimizerConfig{});
  }

  /// Seconds of forward + backward, and of a whole step.
  double gradients_seconds() {
    const Stopwatch watch;
    optimizer_->zero_grad();
    StepOutcome outcome;
    accumulate_gradients(decoder_, batches_, step_options(), outcome);
    return watch.seconds();
  }
  double step_seconds() {
    const Stopwatch watch;
    take_step(decoder_, *optimizer_, monitor_, batches_, step_options());
    return watch.seconds();
  }

  void profile() {
    const OpProfile profile;
    const Stopwatch watch;
    step_seconds();
    const double seconds = watch.seconds();
    fmt::print("{:>8} {:>7} {:>6}  operator (own time in one step of {:.3f} s)\n", "ms", "%", "calls", seconds);
    double shown = 0.0;
    for (const OpTime& time : profile.times()) {
      if (time.seconds < 0.002 * seconds) break;
      shown += time.seconds;
      fmt::print("{:8.1f} {:7.1f} {:6}  {}\n", 1e3 * time.seconds, 100 * time.seconds / seconds, time.calls, time.name);
    }
    fmt::print("{:8.1f} {:7.1f}         the rest and outside of operators\n", 1e3 * (seconds - shown),
               100 * (1 - shown / seconds));
  }

  void run() {
    step_seconds();
    if (options_.profile) profile();
    std::vector<double> steps, gradients;
    for (int64_t i = 0; i < options_.steps; ++i) steps.push_back(step_seconds());
    for (int64_t i = 0; i < std::min<int64_t>(options_.steps, 3); ++i) gradients.push_back(gradients_seconds());
    const ModelCount sizes = count(config_);
    const double tokens = static_cast<double>(options_.rows * options_.context);
    const OrderedJson line = {{"program", "furlong"},
                              {"dtype", options_.dtype},
                              {"tokens_per_s", tokens / median(steps)},
                              {"peak_rss_bytes", peak_rss_bytes()},
                              {"active_parameters", sizes.active_parameters},
                              {"parameters", sizes.parameters},
                              {"step_seconds", median(steps)},
                              {"forward_backward_seconds", median(gradients)},
                              {"threads", at::get_num_threads()},
                              {"steps", options_.steps}};
    fmt::print("{}\n", line.dump());
  }

 private:
  StepOptions step_options() const { return {.lr = 1e-3, .clip = 1.0, .recompute = options_.recompute}; }

  BenchOptions options_;
  ModelConfig config_;
  Decoder decoder_;
  std::vector<Batch> batches_;
  std::optional<Optimizer> optimizer_;
  Monitor monitor_{MonitorConfig{}};
};

BenchOptions parse(const std::vector<std::string>& arguments) {
  BenchOptions options;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    const auto number = [&] {
      if (i + 1 == arguments.size()) throw UsageError(name + ": needs a number");
      return std::stoll(arguments[++i]);
    };
    if (name == "--profile") {
      options.profile = true;
    } else if (name == "--recompute") {
      options.recompute = true;
    } else if (name == "--steps") {
      options.steps = std::max<int64_t>(number(), 1);
    } else if (name == "--threads") {
      options.threads = number();
    } else if (name == "--rows") {
      options.rows = number();
    } else if (name == "--context") {
      options.context = number();
    } else if (name == "--dtype" && i + 1 < arguments.size() &&
               (arguments[i + 1] == "fp32" || arguments[i + 1] == "bf16")) {
      options.dtype = arguments[++i];
    } else {
      throw UsageError("train_bench: cannot use '" + name + "'");
    }
  }
  return options;
}

}  // namespace
}  // namespace furlong

int main(int argc, char** argv) {
  try {
    const auto options = furlong::parse({argv + 1, argv + argc});
    if (options.threads > 0) at::set_num_threads(static_cast<int>(options.threads));
    furlong::Bench(options).run();
  } catch (const furlong::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return error.exit_code();
  }
  return 0;
}
