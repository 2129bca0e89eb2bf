// Kinds prompt and prompt_48b: segments, bytes, ids and loss masks of rendered conversations, exactly; inputs to
// refuse; replies back to reasoning, content and calls. The vocabulary is that of the tokenizer case beside them.

#include <string>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/sha256.h"
#include "furlong/tokenizer/chat_template.h"
#include "furlong/tokenizer/exact_json.h"
#include "furlong/tokenizer/reply_parser.h"
#include "tests/golden/tally.h"
#include "tests/support/golden.h"

namespace furlong::golden {
namespace {

using Ids = std::vector<int64_t>;

OrderedJson cases_of(const Case& test, const char* file) {
  const auto path = test.folder() / file;
  return parse_exact_json(read_file(path), path.string()).at("cases");
}

/// Messages and options of a case as one conversation.
ChatRequest request_of(const OrderedJson& entry) {
  OrderedJson chat = entry.at("options");
  chat["messages"] = entry.at("messages");
  return parse_chat(exact_json_text(chat, JsonStyle::kCompact), entry.at("name").get<std::string>());
}

/// [[text, may hold special tokens], ...]
OrderedJson listed(const std::vector<TextSegment>& segments) {
  OrderedJson list = OrderedJson::array();
  for (const TextSegment& segment : segments) list.push_back({segment.text, segment.special ? 1 : 0});
  return list;
}

/// [[value, length], ...]
OrderedJson runs_of(const std::vector<bool>& mask) {
  OrderedJson runs = OrderedJson::array();
  for (const bool value : mask) {
    if (runs.empty() || runs.back()[0] != (value ? 1 : 0)) runs.push_back({value ? 1 : 0, 0});
    runs.back()[1] = runs.back()[1].get<int64_t>() + 1;
  }
  return runs;
}

void check_render(Case& test, const Tokenizer& tokenizer) {
  Tally texts("prompt texts"), ids("prompt ids"), segments("segments"), masks("loss masks");
  for (const OrderedJson& entry : cases_of(test, "render.json")) {
    const auto name = entry.at("name").get<std::string>();
    const auto rendered = render_chat(chat_format_of(tokenizer), request_of(entry));
    const std::string text = prompt_text(rendered);
    const bool same_hash = !entry.contains("sha256") || sha256_hex(text) == entry["sha256"].get<std::string>();
    texts.add(text == entry.at("rendered").get<std::string>() && same_hash, name + ": " + text);
    const EncodedSegments encoded = tokenizer.encode_segments(rendered);
    ids.add(encoded.ids == entry.at("ids").get<Ids>(), name);
    if (entry.contains("segments")) segments.add(listed(rendered) == entry["segments"], name);
    if (entry.contains("assistant_mask_runs")) {
      masks.add(runs_of(encoded.trained) == entry["assistant_mask_runs"], name);
    }
  }
  texts.report(test);
  ids.report(test);
  if (test.kind() == "prompt_48b") return;
  segments.report(test);
  masks.report(test);
}

void check_refuse(Case& test, const Tokenizer& tokenizer) {
  Tally refused("refusals");
  for (const OrderedJson& entry : cases_of(test, "refuse.json")) {
    bool thrown = false;
    try {
      render_chat(chat_format_of(tokenizer), request_of(entry));
    } catch (const Error&) {
      thrown = true;
    }
    refused.add(thrown, entry.at("name").get<std::string>());
  }
  refused.report(test);
}

Json calls_of(const Reply& reply) {
  Json calls = Json::array();
  for (const ReplyCall& call : reply.tool_calls) {
    calls.push_back({{"name", call.name}, {"arguments", parse_json(call.arguments, call.name)}});
  }
  return calls;
}

void check_parse(Case& test, const Tokenizer& tokenizer) {
  Tally replies("replies"), texts("ids of reply texts");
  const Json file = read_json(test.folder() / "parse_reply.json");
  for (const Json& entry : file.at("cases")) {
    const Ids ids = entry.at("ids").get<Ids>();
    texts.add(tokenizer.decode(ids) == entry.at("text").get<std::string>(), entry.at("name").get<std::string>());
    ReplyOptions options;
    options.thinking = entry.at("thinking").get<bool>();
    const Reply reply = parse_reply(tokenizer, chat_format_of(tokenizer), ids, options);
    replies.add(reply.reasoning == entry.at("reasoning").get<std::string>() &&
                    reply.content == entry.at("content").get<std::string>() &&
                    calls_of(reply) == entry.at("tool_calls"),
                entry.at("name").get<std::string>());
  }
  replies.report(test);
  texts.report(test);
}

void run_prompt(Case& test) {
  const Tokenizer tokenizer = Tokenizer::load(test.folder().parent_path() / "tokenizer");
  check_render(test, tokenizer);
  check_refuse(test, tokenizer);
  check_parse(test, tokenizer);
}

void run_prompt_48b(Case& test) {
  const auto folder = test.folder().parent_path() / "tokenizer";
  check_render(test, Tokenizer::from_text(read_file(folder / "tiktoken.model"), "48b",
                                          read_file(folder / "tokenizer_config.48b.json")));
}

FURLONG_GOLDEN("prompt", run_prompt);
FURLONG_GOLDEN("prompt_48b", run_prompt_48b);

}  // namespace
}  // namespace furlong::golden
