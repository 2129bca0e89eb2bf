#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <string>

#include "app/commands.h"
#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/checkpoint/run_folder.h"
#include "furlong/eval/loss.h"
#include "furlong/model/weights.h"
#include "furlong/tokenizer/tokenizer.h"

namespace furlong::app {

namespace {

struct LossArguments {
  std::string checkpoint, data, out;
  std::string compute = "fp32";
  bool json = false;
  int64_t threads = 0;
  LossOptions options;
};

/// A checkpoint of a run holds its tokenizer: shards of another one give figures without meaning.
void check_tokenizer(const std::filesystem::path& checkpoint, const ShardSet& shards, const std::string& data) {
  if (!std::filesystem::exists(checkpoint / "tiktoken.model")) return;
  if (Tokenizer::load(checkpoint).sha256() == shards.tokenizer_sha256()) return;
  throw UsageError(data + ": was made with another tokenizer than that of " + checkpoint.string());
}

void eval_loss(const LossArguments& arguments) {
  if (arguments.threads > 0) at::set_num_threads(static_cast<int>(arguments.threads));
  if (!arguments.out.empty()) AtomicFile{arguments.out};  // a place that cannot be written is refused before the work
  const auto folder = find_checkpoint(arguments.checkpoint);
  const ShardSet shards(arguments.data);
  check_tokenizer(folder, shards, arguments.data);
  const auto decoder = load_decoder(folder, arguments.compute == "bf16" ? at::kBFloat16 : at::kFloat, at::kCPU);
  const LossReport report = evaluate_loss(*decoder, shards, arguments.options);
  OrderedJson values = {
      {"checkpoint", folder.string()}, {"data", arguments.data}, {"window", arguments.options.window}};
  values.update(report.to_json());
  const std::string text = values.dump(2) + "\n";
  if (!arguments.out.empty()) write_file_atomic(arguments.out, text);
  if (arguments.json || arguments.out.empty()) {
    std::fputs(text.c_str(), stdout);
  } else {
    std::printf("%.4f bits per byte, %.4f nats per token over %lld tokens, %lld bytes\n", report.bits_per_byte(),
                report.nats_per_token(), static_cast<long long>(report.tokens), static_cast<long long>(report.bytes));
  }
}

void add_loss(CLI::App& eval) {
  auto arguments = std::make_shared<LossArguments>();
  auto* command =
      eval.add_subcommand("loss", "Nats per token and bits per byte of documents, each from an empty state");
  command->add_option("--checkpoint", arguments->checkpoint, "A checkpoint folder, or a run: its newest one")
      ->required();
  command->add_option("--data", arguments->data, "Folder of token shards")->required();
  command->add_option("--context,--window", arguments->options.window, "Empty the state every N tokens; 0: never")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--chunk", arguments->options.chunk, "Tokens a forward pass")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--compute", arguments->compute, "Precision of weights and activations")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
  command->add_option("--threads", arguments->threads, "0: all cores")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_option("--out", arguments->out, "Write the JSON here; a line on standard output instead");
  command->add_flag("--json", arguments->json, "JSON on standard output (always, without --out)");
  command->footer("Example:\n  furlong eval loss --checkpoint out/demo/run --data out/demo/data/heldout");
  command->callback([arguments] { eval_loss(*arguments); });
}

}  // namespace

void add_eval(CLI::App& app, int&) {
  auto* command = app.add_subcommand("eval", "Evaluate a checkpoint");
  command->require_subcommand(1);
  add_loss(*command);
}

}  // namespace furlong::app
