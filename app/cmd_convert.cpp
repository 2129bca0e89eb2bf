#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "app/commands.h"
#include "app/format.h"
#include "furlong/checkpoint/run_folder.h"
#include "furlong/model/convert.h"

namespace furlong::app {

namespace {

struct Arguments {
  std::string from, to;
  std::string dtype = "as-stored";
  double shard_gigabytes = 5;
};

void convert(const Arguments& arguments) {
  ConvertOptions options;
  if (arguments.dtype != "as-stored") options.dtype = arguments.dtype == "bf16" ? at::kBFloat16 : at::kFloat;
  options.shard_bytes = static_cast<uint64_t>(arguments.shard_gigabytes * 1e9);
  options.on_shard = [](int64_t shard, int64_t shards, uint64_t bytes) {
    fmt::print(stderr, "file {} of {}, {}\n", shard, shards, human_bytes(static_cast<double>(bytes)));
  };
  const ConvertResult result = convert_checkpoint(find_checkpoint(arguments.from), arguments.to, options);
  fmt::print("{}: {} tensors, {} in {} file{}", arguments.to, result.tensors,
             human_bytes(static_cast<double>(result.bytes)), result.shards, result.shards == 1 ? "" : "s");
  if (result.carried > 0) fmt::print("; {} of parts that are not run (vision), untouched", result.carried);
  if (result.reused_shards > 0) fmt::print("; {} files were there from an earlier start", result.reused_shards);
  fmt::print("\n");
}

}  // namespace

void add_convert(CLI::App& app, int&) {
  auto* command = app.add_subcommand("convert", "Write a checkpoint anew: other dtype, other files, published names");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("from", arguments->from, "Run, checkpoint or Hugging Face folder")->required();
  command->add_option("to", arguments->to, "Folder to make")->required();
  command
      ->add_option("--dtype", arguments->dtype,
                   "Of weights; fp32: for training. Precision-critical tensors stay fp32. as-stored: packed experts "
                   "become bf16")
      ->check(CLI::IsMember({"as-stored", "bf16", "fp32"}))
      ->capture_default_str();
  command->add_option("--shard-gb", arguments->shard_gigabytes, "Most gigabytes in one file")
      ->check(CLI::Range(1e-6, 1e6))
      ->capture_default_str();
  command->footer(
      "A killed conversion goes on where it was when it is started again.\n"
      "Examples:\n"
      "  furlong convert Kimi-Linear-48B-A3B-Instruct out/linear-fp32 --dtype fp32\n"
      "  furlong convert out/demo/run out/demo-hf --dtype bf16");
  command->callback([arguments] { convert(*arguments); });
}

}  // namespace furlong::app
