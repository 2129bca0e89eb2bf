#include "furlong/tokenizer/chat_template.h"

#include <algorithm>
#include <array>

#include "furlong/base/error.h"
#include "furlong/tokenizer/render.h"

namespace furlong {

namespace {

constexpr std::array kXtmlTokens = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"};
constexpr std::array kTurnsTokens = {"<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"};

}  // namespace

ChatFormat chat_format_of(const Tokenizer& tokenizer) {
  const auto has_all = [&](const auto& names) {
    return std::all_of(names.begin(), names.end(), [&](const char* name) { return tokenizer.special_id(name); });
  };
  const bool xtml = has_all(kXtmlTokens);
  const bool turns = has_all(kTurnsTokens);
  if (xtml == turns) {
    throw FormatError(std::string("the token table has the control tokens of ") + (xtml ? "both" : "no") +
                      " chat format, need those of one: " + kXtmlTokens[0] + ", ... or " + kTurnsTokens[0] + ", ...");
  }
  return xtml ? ChatFormat::kXtml : ChatFormat::kTurns;
}

std::vector<TextSegment> render_chat(ChatFormat format, const ChatRequest& request) {
  return format == ChatFormat::kXtml ? render_xtml(request) : render_turns(request);
}

std::string prompt_text(const std::vector<TextSegment>& segments) {
  std::string text;
  for (const TextSegment& segment : segments) text += segment.text;
  return text;
}

std::string plain_text(const ChatMessage& message, const std::string& what) {
  std::string text;
  for (const ContentPart& part : message.content) {
    if (part.image) throw UsageError("[chat] " + what + " holds an image, need text");
    text += part.text;
  }
  return text;
}

std::string escape_attribute(const std::string& value) {
  std::string escaped;
  for (const char c : value) {
    if (c == '&') {
      escaped += "&amp;";
    } else if (c == '"') {
      escaped += "&quot;";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

std::string unescape_attribute(const std::string& value) {
  std::string plain;
  for (size_t at = 0; at < value.size(); ++at) {
    if (value.compare(at, 5, "&amp;") == 0) {
      plain += '&';
      at += 4;
    } else if (value.compare(at, 6, "&quot;") == 0) {
      plain += '"';
      at += 5;
    } else {
      plain += value[at];
    }
  }
  return plain;
}

}  // namespace furlong
