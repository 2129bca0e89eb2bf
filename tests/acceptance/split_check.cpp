// split_check --checkpoint RUN --data SHARDS: a trained model gives the same for one sequence run whole, in chunks of
// any size, packed between others, and over a saved state that another process goes on with; a packed batch has the
// loss and gradients of its documents apart. Exit 1 when a limit is exceeded, 2 when the weights are trivial.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/checkpoint/run_folder.h"
#include "furlong/data/shards.h"
#include "furlong/model/state.h"
#include "furlong/model/weights.h"
#include "furlong/train/train_state.h"
#include "tests/acceptance/split_cases.h"
#include "tests/support/tiny_run.h"

namespace furlong::testing_support {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBefore = 97, kAfter = 33;  // tokens of the sequences packed around the one under test
constexpr int64_t kMinSteps = 50;

struct Arguments {
  std::string checkpoint, data;
  int64_t tokens = 700;
  std::string saved_state, result;  // of the second process: what to go on from, where to write
};

/// Trivial weights prove little: pseudo-queries start at zero, where an attention residual is a plain mean.
void require_trained(const Decoder& decoder, const fs::path& checkpoint) {
  const int64_t steps = read_train_state(checkpoint).optimizer_steps;
  if (steps < kMinSteps) {
    throw UsageError(fmt::format("{}: {} optimizer steps, need {}", checkpoint.string(), steps, kMinSteps));
  }
  const auto moved = [](const Param& param) {
    return param.spec.name.find("_res_proj") != std::string::npos && param.tensor->any().item<bool>();
  };
  if (std::none_of(decoder.params().begin(), decoder.params().end(), moved)) {
    throw UsageError(checkpoint.string() + ": no pseudo-query of an attention residual differs from zero");
  }
  const auto blocks = decoder.moe_layers();
  if (std::all_of(blocks.begin(), blocks.end(), [](const MoeLayer* block) { return block == nullptr; })) {
    throw UsageError(checkpoint.string() + ": no layer is a mixture of experts");
  }
}

/// `count` tokens from the beginning of the longest document.
at::Tensor held_out_tokens(const std::string& folder, int64_t count) {
  const ShardSet shards(folder);
  int64_t longest = 0;
  for (int64_t d = 1; d < shards.num_documents(); ++d) {
    if (shards.document_length(d) > shards.document_length(longest)) longest = d;
  }
  if (shards.num_documents() == 0 || shards.document_length(longest) < count) {
    throw UsageError(fmt::format("{}: no document of {} tokens", folder, count));
  }
  at::Tensor tokens_N = at::empty({count}, at::kLong);
  shards.copy_tokens(longest, 0, count, tokens_N.mutable_data_ptr<int64_t>());
  return tokens_N;
}

/// Feeds what is left of a sequence, in pieces of 1, 5 and 64 tokens with the router free. Logits.
at::Tensor go_on(const Decoder& decoder, DecoderState& state, int64_t slot, const at::Tensor& tokens_N) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kPieces[] = {1, 5, 64};
  std::vector<at::Tensor> hidden;
  for (size_t call = 0; state.position(slot) < tokens_N.size(0); ++call) {
    const int64_t first = state.position(slot);
    const int64_t count = std::min(kPieces[call % std::size(kPieces)], tokens_N.size(0) - first);
    const auto layout = state.layout({slot}, {count});
    hidden.push_back(decoder.forward(tokens_N.slice(0, first, first + count), layout, &state, {}));
  }
  return decoder.logits(at::cat(hidden));
}

/// Runs this program again; its exit code, -1 when it did not end by itself.
int run_again(std::vector<std::string> words) {
  words.insert(words.begin(), "/proc/self/exe");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t child = 0;
  int status = 0;
  if (posix_spawn(&child, argv[0], nullptr, nullptr, argv.data(), environ) != 0) return -1;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

/// The second process: goes on from a saved state and writes logits and final state.
void go_on_from_file(const Decoder& decoder, const at::Tensor& tokens_N, const Arguments& arguments) {
  DecoderState state(decoder, 1);
  state.restore(0, SequenceState::load(arguments.saved_state));
  const at::Tensor logits_NV = go_on(decoder, state, 0, tokens_N);
  write_tensors(arguments.result + ".logits", {{"logits", logits_NV}});
  state.snapshot(0).save(arguments.result + ".state");
}

/// Half the sequence, saved; the other half here and in a new process.
void check_saved(const Decoder& decoder, const at::Tensor& tokens_N, const Arguments& arguments, SplitReport& report) {
  const fs::path folder = fresh_folder("split_check");
  const std::string saved = folder / "half", result = folder / "whole";
  DecoderState state(decoder, 2);
  go_on(decoder, state, 1, tokens_N.slice(0, 0, tokens_N.size(0) / 2));
  state.snapshot(1).save(saved);
  const at::Tensor logits_NV = go_on(decoder, state, 1, tokens_N);
  const int code = run_again({"--checkpoint", arguments.checkpoint, "--data", arguments.data, "--tokens",
                              std::to_string(arguments.tokens), "--saved-state", saved, "--result", result});
  report.judge_same_bits("saved, new process goes on",
                         code == 0 && at::equal(CheckpointReader(result + ".logits").tensor("logits"), logits_NV) &&
                             same_bits(SequenceState::load(result + ".state"), state.snapshot(1)));
  fs::remove_all(folder);
}

int run(const Arguments& arguments) {
  const fs::path checkpoint = find_checkpoint(arguments.checkpoint);
  const auto decoder = load_decoder(checkpoint, at::kFloat, at::kCPU);
  const int64_t count = arguments.tokens;
  const at::Tensor all_N = held_out_tokens(arguments.data, count + kBefore + kAfter);
  const at::Tensor tokens_N = all_N.slice(0, 0, count);
  if (!arguments.saved_state.empty()) {
    go_on_from_file(*decoder, tokens_N, arguments);
    return 0;
  }
  require_trained(*decoder, checkpoint);
  SplitReport report;
  const Sequences sequences =
      run_sequences(*decoder, {tokens_N, all_N.slice(0, count, count + kBefore), all_N.slice(0, count + kBefore)});
  check_chunks(*decoder, sequences, report);
  check_packed(*decoder, sequences, report);
  check_saved(*decoder, tokens_N, arguments, report);
  show_flips(*decoder, sequences, report);
  show_exact_chunks(*decoder, tokens_N, report);
  check_documents(*decoder, tokens_N, report);
  return report.finish() ? 0 : 1;
}

}  // namespace
}  // namespace furlong::testing_support

int main(int argc, char** argv) {
  furlong::testing_support::Arguments arguments;
  CLI::App app(
      "Compares one sequence run whole with the same in pieces, packed, and saved between, on trained weights.");
  app.add_option("--checkpoint", arguments.checkpoint, "A checkpoint folder, or a run: its newest one")->required();
  app.add_option("--data", arguments.data, "Folder of token shards that training has not seen")->required();
  app.add_option("--tokens", arguments.tokens, "Length of the sequence")->check(CLI::Range(2, 1 << 20));
  app.add_option("--saved-state", arguments.saved_state)->group("");
  app.add_option("--result", arguments.result)->group("");
  try {
    app.parse(argc, argv);
    return furlong::testing_support::run(arguments);
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? app.exit(error) : (app.exit(error), 2);
  } catch (const furlong::Error& error) {
    std::fprintf(stderr, "split_check: %s\n", error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "split_check: %s\n", error.what());
    return 1;
  }
}
