// What a model says, as token ids. Byte 0: format and options; byte 1: tokens a push. A following byte below 0xe0 is
// that byte's token, others are control tokens. Pushes of any size add up to the reply parsed at once, in valid UTF-8.

#include <algorithm>

#include "furlong/tokenizer/reply_parser.h"
#include "furlong/tokenizer/special_tokens.h"
#include "furlong/tokenizer/trainer.h"
#include "furlong/tokenizer/utf8.h"
#include "tests/fuzz/fuzz.h"

namespace {

using furlong::Reply;
using furlong::fuzz::require;
using Ids = std::vector<int64_t>;

constexpr int kControl = 0xe0;

furlong::Tokenizer with_names(const std::vector<std::string>& names) {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  return furlong::Tokenizer::from_text(furlong::rank_file_text(tokens), "fuzz",
                                       furlong::SpecialTokens(256, names).to_json());
}

const furlong::Tokenizer& tokenizer_of(furlong::ChatFormat format) {
  static const furlong::Tokenizer xtml =
      with_names({"[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "<|media_pad|>"});
  static const furlong::Tokenizer turns =
      with_names({"[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
                  "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                  "<|tool_call_argument_begin|>", "<|tool_call_end|>"});
  return format == furlong::ChatFormat::kXtml ? xtml : turns;
}

struct Sum {
  std::string reasoning, content;
  std::vector<std::string> arguments;
  int64_t complete = 0;

  void add(const std::vector<furlong::ReplyEvent>& events) {
    using Kind = furlong::ReplyEvent::Kind;
    for (const auto& event : events) {
      switch (event.kind) {
        case Kind::kReasoning:
          reasoning += event.text;
          break;
        case Kind::kContent:
          content += event.text;
          break;
        case Kind::kReasoningIsContent:
          content = reasoning + content;
          reasoning.clear();
          break;
        case Kind::kCallBegin:
          arguments.emplace_back();
          break;
        case Kind::kCallArguments:
          arguments.at(event.call) += event.text;
          break;
        case Kind::kCallEnd:
          complete += event.complete ? 1 : 0;
          break;
      }
    }
  }
};

void agree(const Sum& sum, const Reply& pushed, const Reply& whole) {
  require(pushed.reasoning == whole.reasoning && pushed.content == whole.content && pushed.ended == whole.ended);
  require(pushed.tool_calls.size() == whole.tool_calls.size());
  require(pushed.unfinished_calls.size() == whole.unfinished_calls.size());
  for (size_t i = 0; i < whole.tool_calls.size(); ++i) {
    require(pushed.tool_calls[i].name == whole.tool_calls[i].name && pushed.tool_calls[i].id == whole.tool_calls[i].id);
    require(pushed.tool_calls[i].arguments == whole.tool_calls[i].arguments);
    require(!whole.tool_calls[i].name.empty());
  }
  require(sum.reasoning == whole.reasoning && sum.content == whole.content);
  require(sum.complete == static_cast<int64_t>(whole.tool_calls.size()));
  for (const std::string& text : {whole.reasoning, whole.content}) {
    require(furlong::replace_invalid_utf8(text) == text);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const auto format = (data[0] & 1) != 0 ? furlong::ChatFormat::kXtml : furlong::ChatFormat::kTurns;
  const furlong::ReplyOptions options{(data[0] & 2) != 0, (data[0] & 4) != 0, data[0] >> 6};
  const furlong::Tokenizer& tokenizer = tokenizer_of(format);
  Ids ids;
  for (size_t i = 2; i < size; ++i) {
    const int64_t control = 256 + data[i] - kControl;
    ids.push_back(data[i] < kControl ? data[i] : std::min(control, tokenizer.vocab_size() - 1));
  }
  const Reply whole = furlong::parse_reply(tokenizer, format, ids, options);
  furlong::ReplyParser parser(tokenizer, format, options);
  Sum sum;
  const size_t step = 1 + data[1] % 7;
  for (size_t at = 0; at < ids.size(); at += step) {
    sum.add(parser.push(std::span(ids).subspan(at, std::min(step, ids.size() - at))));
  }
  sum.add(parser.finish());
  agree(sum, parser.reply(), whole);
  return 0;
}
