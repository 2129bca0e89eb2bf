// furlong tokenizer: train a vocabulary, turn text into ids and back, render prompts, parse replies, look at one.

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
#include "furlong/tokenizer/chat.h"
#include "furlong/tokenizer/chat_template.h"
#include "furlong/tokenizer/reply_parser.h"
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
  const int64_t vocabulary = ranks + options.reserved;
  make_folders(options.out);
  write_file_atomic(options.out / "tiktoken.model", rank_file_text(tokens));
  write_file_atomic(options.out / "tokenizer_config.json", SpecialTokens::standard(ranks, options.reserved).to_json());
  if (vocabulary < options.vocab) {
    say("the corpus has no pair of tokens left that occurs twice: got a vocabulary of " + std::to_string(vocabulary) +
        ", asked for " + std::to_string(options.vocab));
  }
  std::printf("%s: vocabulary %lld (%lld ranks + %lld reserved) from %lld documents, %lld bytes, %.1f s\n",
              options.out.c_str(), static_cast<long long>(vocabulary), static_cast<long long>(ranks),
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

/// The arguments' ids, else those of standard input.
std::vector<int64_t> listed_ids(const std::vector<std::string>& arguments) {
  std::string listed;
  for (const std::string& id : arguments) listed += id + " ";
  return parse_ids(text_of(listed, {}));
}

/// A prompt as JSON: segments, ids, and which of them a loss counts.
OrderedJson prompt_json(const std::vector<TextSegment>& segments, const EncodedSegments& encoded) {
  OrderedJson list = OrderedJson::array();
  for (const TextSegment& segment : segments) {
    list.push_back({{"text", segment.text}, {"special", segment.special}, {"trained", segment.trained}});
  }
  OrderedJson trained = OrderedJson::array();
  for (const bool counts : encoded.trained) trained.push_back(counts ? 1 : 0);
  return {{"text", prompt_text(segments)}, {"segments", list}, {"ids", encoded.ids}, {"trained", trained}};
}

OrderedJson reply_json(const Reply& reply) {
  const auto calls = [](const std::vector<ReplyCall>& all) {
    OrderedJson list = OrderedJson::array();
    for (const ReplyCall& call : all) {
      list.push_back({{"id", call.id}, {"name", call.name}, {"arguments", call.arguments}});
    }
    return list;
  };
  return {{"reasoning", reply.reasoning},
          {"content", reply.content},
          {"tool_calls", calls(reply.tool_calls)},
          {"unfinished_calls", calls(reply.unfinished_calls)},
          {"ended", reply.ended}};
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
    bool raw = false, skip_special = false;
  };
  auto* command = group.add_subcommand("decode", "Print the text of token ids");
  auto options = std::make_shared<Options>();
  command->add_option("ID", options->ids, "The ids; without any, standard input is read");
  command->add_option("--tokenizer", *tokenizer, "Folder with tiktoken.model")->required();
  command->add_flag("--raw", options->raw, "The bytes as they are: no newline added, invalid UTF-8 not replaced");
  command->add_flag("--skip-special", options->skip_special,
                    "Leave special tokens out instead of printing their names");
  command->footer(
      "Example:\n  furlong tokenizer encode --tokenizer tokenizer 'In the beginning' |\n"
      "    furlong tokenizer decode --tokenizer tokenizer");
  command->callback([options, tokenizer] {
    const Tokenizer loaded = Tokenizer::load(*tokenizer);
    const auto ids = listed_ids(options->ids);
    const std::string text = options->skip_special ? loaded.decode_ordinary(ids) : loaded.decode(ids);
    const std::string shown = options->raw ? text : replace_invalid_utf8(text) + "\n";
    std::fwrite(shown.data(), 1, shown.size(), stdout);
  });
}

void add_render(CLI::App& group, const std::shared_ptr<std::filesystem::path>& tokenizer) {
  struct Options {
    std::filesystem::path chat;
    bool ids = false, json = false;
  };
  auto* command =
      group.add_subcommand("render", "Print the prompt of a conversation, as the tokenizer's model reads it");
  auto options = std::make_shared<Options>();
  command->add_option("CHAT", options->chat,
                      "JSON with messages and, if wanted, tools, thinking, thinking_effort, tool_choice, "
                      "response_format, add_generation_prompt, image_prompts; without it, standard input is read");
  command->add_option("--tokenizer", *tokenizer, "Folder with tiktoken.model and tokenizer_config.json")->required();
  auto* ids = command->add_flag("--ids", options->ids, "Print the ids instead of the text");
  command->add_flag("--json", options->json, "Print text, segments, ids and loss mask as JSON")->excludes(ids);
  command->footer("Example:\n  furlong tokenizer render chat.json --tokenizer tokenizer");
  command->callback([options, tokenizer] {
    const Tokenizer loaded = Tokenizer::load(*tokenizer);
    const std::string where = options->chat.empty() ? "standard input" : options->chat.string();
    const auto segments = render_chat(chat_format_of(loaded), parse_chat(text_of({}, options->chat), where));
    if (!options->ids && !options->json) {
      const std::string text = prompt_text(segments) + "\n";
      std::fwrite(text.data(), 1, text.size(), stdout);
      return;
    }
    const EncodedSegments encoded = loaded.encode_segments(segments);
    if (options->ids) return print_ids(encoded.ids);
    std::puts(prompt_json(segments, encoded).dump(2).c_str());
  });
}

void add_parse(CLI::App& group, const std::shared_ptr<std::filesystem::path>& tokenizer) {
  struct Options {
    std::vector<std::string> ids;
    std::filesystem::path file;
    bool no_thinking = false;
  };
  auto* command = group.add_subcommand("parse", "Split a model's reply into reasoning, content and tool calls");
  auto options = std::make_shared<Options>();
  auto* ids =
      command->add_option("ID", options->ids, "The reply's ids; without any and --file, standard input is read");
  command->add_option("--file", options->file, "Read the reply as text, names of special tokens in it as those tokens")
      ->excludes(ids);
  command->add_option("--tokenizer", *tokenizer, "Folder with tiktoken.model and tokenizer_config.json")->required();
  command->add_flag("--no-thinking", options->no_thinking,
                    "The prompt ended in the answer, not in the thinking channel");
  command->footer("Example:\n  furlong tokenizer parse --tokenizer tokenizer --file reply.txt");
  command->callback([options, tokenizer] {
    const Tokenizer loaded = Tokenizer::load(*tokenizer);
    const auto reply_ids =
        options->file.empty() ? listed_ids(options->ids) : loaded.encode_with_special(read_file(options->file));
    const ReplyOptions how = {.thinking = !options->no_thinking};
    std::puts(reply_json(parse_reply(loaded, chat_format_of(loaded), reply_ids, how)).dump(2).c_str());
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
  add_render(*group, folder);
  add_parse(*group, folder);
  add_inspect(*group, folder);
}

}  // namespace furlong::app
