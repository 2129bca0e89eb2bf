// furlong data: turn text into token shards, look at some.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "app/commands.h"
#include "app/corpus_options.h"
#include "furlong/base/clock.h"
#include "furlong/base/json.h"
#include "furlong/base/log.h"
#include "furlong/data/prepare.h"
#include "furlong/data/shards.h"

namespace furlong::app {

namespace {

void print_totals(const std::filesystem::path& folder, const ShardTotals& totals) {
  std::printf("%s: %lld documents, %lld tokens, %lld bytes (%.3f bytes per token), %lld shards\n", folder.c_str(),
              static_cast<long long>(totals.documents), static_cast<long long>(totals.tokens),
              static_cast<long long>(totals.bytes),
              static_cast<double>(totals.bytes) / static_cast<double>(std::max<int64_t>(totals.tokens, 1)),
              static_cast<long long>(totals.shards));
}

void prepare(const PrepareOptions& options) {
  const Stopwatch watch;
  const PrepareReport report = prepare_shards(options);
  if (report.corpus.empty > 0) say("left out " + std::to_string(report.corpus.empty) + " documents without text");
  if (report.corpus.bad_lines > 0) say("left out " + std::to_string(report.corpus.bad_lines) + " bad lines");
  if (options.val_fraction > 0.0) {
    print_totals(options.out / "train", report.train);
    print_totals(options.out / "val", report.val);
  } else {
    print_totals(options.out, report.train);
  }
  say(fmt::format("{} files in {:.1f} s", report.corpus.files, watch.seconds()));
}

void add_prepare(CLI::App& group) {
  auto* command = group.add_subcommand("prepare", "Write token shards from text; each document ends with [EOS]");
  auto options = std::make_shared<PrepareOptions>();
  add_corpus_options(*command, options->corpus);
  command->add_option("--tokenizer", options->tokenizer, "Folder with tiktoken.model")->required();
  command->add_option("--out", options->out, "Folder to write; an older one with shards is replaced")->required();
  command->add_option("--val-fraction", options->val_fraction,
                      "Hold out this share of the documents: writes OUT/train and OUT/val");
  command->add_option("--seed", options->seed, "Seed of the choice of held-out documents")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 62))
      ->capture_default_str();
  command->add_option("--shard-tokens", options->shard_tokens, "Most tokens in one shard")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  command->footer(
      "Examples:\n  furlong data prepare text/ --tokenizer tokenizer --out data\n"
      "  furlong data prepare corpus.jsonl --field body --tokenizer tokenizer --out data --val-fraction 0.01");
  command->callback([options] { prepare(*options); });
}

void inspect(const std::filesystem::path& folder, bool as_json) {
  const ShardSet shards(folder);
  int64_t longest = 0;
  for (int64_t d = 0; d < shards.num_documents(); ++d) longest = std::max(longest, shards.document_length(d));
  const double bytes_per_token =
      static_cast<double>(shards.num_bytes()) / static_cast<double>(std::max<int64_t>(shards.num_tokens(), 1));
  const OrderedJson summary = {{"documents", shards.num_documents()},
                               {"tokens", shards.num_tokens()},
                               {"bytes", shards.num_bytes()},
                               {"bytes_per_token", bytes_per_token},
                               {"longest_document_tokens", longest},
                               {"vocab_size", shards.vocab_size()},
                               {"tokenizer_sha256", shards.tokenizer_sha256()}};
  if (as_json) {
    std::puts(summary.dump(2).c_str());
    return;
  }
  for (const auto& [key, value] : summary.items()) {
    std::printf("%-24s %s\n", key.c_str(), value.is_string() ? value.get<std::string>().c_str() : value.dump().c_str());
  }
}

void add_inspect(CLI::App& group) {
  struct Options {
    std::filesystem::path folder;
    bool as_json = false;
  };
  auto* command = group.add_subcommand("inspect", "Print the counts of a folder of shards");
  auto options = std::make_shared<Options>();
  command->add_option("DIR", options->folder, "Folder written by furlong data prepare")->required();
  command->add_flag("--json", options->as_json, "Print JSON");
  command->footer("Example:\n  furlong data inspect data/train");
  command->callback([options] { inspect(options->folder, options->as_json); });
}

}  // namespace

void add_data(CLI::App& app, int&) {
  auto* group = app.add_subcommand("data", "Prepare and look at token shards");
  group->require_subcommand(1);
  add_prepare(*group);
  add_inspect(*group);
}

}  // namespace furlong::app
