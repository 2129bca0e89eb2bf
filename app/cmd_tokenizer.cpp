// furlong tokenizer: train a vocabulary, turn text into ids and back, look at one.

#include <cstdio>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>

#include "app/commands.h"
#include "app/corpus_options.h"
#include "furlong/base/clock.h"
#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/json.h"
#include "furlong/base/log.h"
#include "furlong/data/corpus.h"
#include "furlong/tokenizer/special_tokens.h"
#include "furlong/tokenizer/tokenizer.h"
#include "furlong/tokenizer/trainer.h"
#include "furlong/tokenizer/utf8.h"

namespace furlong::app {

namespace {

struct TrainOptions {
  CorpusOptions corpus;
  int64_t vocab = 0;
  int64_t reserved = 16;
  std::filesystem::path out;
};

void train(const TrainOptions& options) {
  const Stopwatch watch;
  SpecialTokens::standard(0, options.reserved);  // refuses a count that is too small before the work
  if (options.vocab < 256 + options.reserved) {
    throw UsageError("--vocab: got " + std::to_string(options.vocab) + ", need at least 256 bytes + " +
                     std::to_string(options.reserved) + " reserved ids");
  }
  TokenizerTrainer trainer;
  const CorpusCounts counts = read_corpus(options.corpus, [&](std::string_view text) { trainer.add(text); });
  const std::vector<std::string> tokens = trainer.train(options.vocab - options.reserved);
  const auto ranks = static_cast<int64_t>(tokens.size());
  make_folders(options.out);
  write_file_atomic(options.out / "tiktoken.model", rank_file_text(tokens));
  write_file_atomic(options.out / "tokenizer_config.json", SpecialTokens::standard(ranks, options.reserved).to_json());
  if (ranks + options.reserved < options.vocab) {
    say("the corpus has no pair of tokens left that occurs twice: got a vocabulary of " +
        std::to_string(ranks + options.reserved) + ", asked for " + std::to_string(options.vocab));
  }
  std::printf("%s: vocabulary %lld (%lld ranks + %lld reserved) from %lld documents, %lld bytes, %.1f s\n",
              options.out.c_str(), static_cast<long long>(ranks + options.reserved), static_cast<long long>(ranks),
              static_cast<long long>(options.reserved), static_cast<long long>(counts.documents),
              static_cast<long long>(trainer.num_bytes()), watch.seconds());
}

/// The argument's text, else a file's, else standard input.
std::string text_of(const std::string& text, const std::filesystem::path& file) {
  if (!file.empty()) return read_file(file);
  if (!text.empty()) return text;
  return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
}

void print_ids(const std::vector<int64_t>& ids) {
  std::string line;
  for (const int64_t id : ids) line += (line.empty() ? "" : " ") + std::to_string(id);
  std::puts(line.c_str());
}

std::vector<int64_t> parse_ids(const std::string& text) {
  std::istringstream stream(text);
  std::vector<int64_t> ids;
  int64_t id = 0;
  while (stream >> id) ids.push_back(id);
  if (!stream.eof()) throw UsageError("ids: need whole numbers separated by spaces");
  return ids;
}

void inspect(const Tokenizer& tokenizer, bool as_json) {
  OrderedJson special = OrderedJson::object();
  for (int64_t id = tokenizer.num_ranks(); id < tokenizer.vocab_size(); ++id) {
    const std::string name(tokenizer.token_bytes(id));
    if (!name.starts_with("<|reserved_token_")) special[name] = id;
  }
  size_t longest = 0;
  for (int64_t id = 0; id < tokenizer.num_ranks(); ++id) longest = std::max(longest, tokenizer.token_bytes(id).size());
  const OrderedJson summary = {{"vocab_size", tokenizer.vocab_size()},
                               {"ranks", tokenizer.num_ranks()},
                               {"longest_token_bytes", longest},
                               {"sha256", tokenizer.sha256()},
                               {"special", special}};
  if (as_json) {
    std::puts(summary.dump(2).c_str());
    return;
  }
  std::printf("vocabulary  %lld ids: %lld ranks, %lld reserved\nlongest     %zu bytes\nsha256      %s\n",
              static_cast<long long>(tokenizer.vocab_size()), static_cast<long long>(tokenizer.num_ranks()),
              static_cast<long long>(tokenizer.vocab_size() - tokenizer.num_ranks()), longest,
              tokenizer.sha256().c_str());
  for (const auto& [name, id] : special.items()) std::printf("%-11lld %s\n", id.get<long long>(), name.c_str());
}

void add_train(CLI::App& group) {
  auto* command = group.add_subcommand("train", "Train a byte-level BPE vocabulary on text");
  auto options = std::make_shared<TrainOptions>();
  add_corpus_options(*command, options->corpus);
  command->add_option("--vocab", options->vocab, "Size of the vocabulary, bytes and reserved ids included")->required();
  command->add_option("--out", options->out, "Folder to write")->required();
  command->add_option("--reserved", options->reserved, "Reserved special ids at its end")->capture_default_str();
  command->footer("Example:\n  furlong tokenizer train text/ --vocab 2048 --out tokenizer");
  command->callback([options] { train(*options); });
}

void add_encode(CLI::App& group, const std::shared_ptr<std::filesystem::path>& tokenizer) {
  struct Options {
    std::string text;
    std::filesystem::path file;
    bool special = false, count = false;
  };
  auto* command = group.add_subcommand("encode", "Print the token ids of a text");
  auto options = std::make_shared<Options>();
  command->add_option("TEXT", options->text, "The text; without it and --file, standard input is read");
  command->add_option("--file", options->file, "Read the text from a file");
  command->add_option("--tokenizer", *tokenizer, "Folder with tiktoken.model")->required();
  command->add_flag("--special", options->special, "Names of special tokens in the text become their ids");
  command->add_flag("--count", options->count, "Print bytes, tokens and bytes per token instead of ids");
  command->footer("Example:\n  furlong tokenizer encode --tokenizer tokenizer 'In the beginning'");
  command->callback([options, tokenizer] {
    const Tokenizer loaded = Tokenizer::load(*tokenizer);
    const std::string text = text_of(options->text, options->file);
    const auto ids = options->special ? loaded.encode_with_special(text) : loaded.encode(text);
    if (!options->count) return print_ids(ids);
    std::printf("%zu bytes, %zu tokens, %.3f bytes per token\n", text.size(), ids.size(),
                static_cast<double>(text.size()) / static_cast<double>(std::max<size_t>(ids.size(), 1)));
  });
}

void add_decode(CLI::App& group, const std::shared_ptr<std::filesystem::path>& tokenizer) {
  struct Options {
    std::vector<std::string> ids;
    bool raw = false;
  };
  auto* command = group.add_subcommand("decode", "Print the text of token ids");
  auto options = std::make_shared<Options>();
  command->add_option("ID", options->ids, "The ids; without any, standard input is read");
  command->add_option("--tokenizer", *tokenizer, "Folder with tiktoken.model")->required();
  command->add_flag("--raw", options->raw, "The bytes as they are: no newline added, invalid UTF-8 not replaced");
  command->footer(
      "Example:\n  furlong tokenizer encode --tokenizer tokenizer 'In the beginning' |\n"
      "    furlong tokenizer decode --tokenizer tokenizer");
  command->callback([options, tokenizer] {
    std::string listed;
    for (const std::string& id : options->ids) listed += id + " ";
    const std::string text = Tokenizer::load(*tokenizer).decode(parse_ids(text_of(listed, {})));
    const std::string shown = options->raw ? text : replace_invalid_utf8(text) + "\n";
    std::fwrite(shown.data(), 1, shown.size(), stdout);
  });
}

void add_inspect(CLI::App& group, const std::shared_ptr<std::filesystem::path>& tokenizer) {
  auto* command = group.add_subcommand("inspect", "Print the size, the digest and the special tokens");
  auto as_json = std::make_shared<bool>(false);
  command->add_option("DIR", *tokenizer, "Folder with tiktoken.model")->required();
  command->add_flag("--json", *as_json, "Print JSON");
  command->footer("Example:\n  furlong tokenizer inspect tokenizer");
  command->callback([as_json, tokenizer] { inspect(Tokenizer::load(*tokenizer), *as_json); });
}

}  // namespace

void add_tokenizer(CLI::App& app, int&) {
  auto* group = app.add_subcommand("tokenizer", "Train and use a tokenizer");
  group->require_subcommand(1);
  const auto folder = std::make_shared<std::filesystem::path>();
  add_train(*group);
  add_encode(*group, folder);
  add_decode(*group, folder);
  add_inspect(*group, folder);
}

}  // namespace furlong::app
