#include "furlong/tokenizer/reply_tag.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "furlong/tokenizer/chat_template.h"

namespace furlong {

namespace {

constexpr std::array<std::string_view, 7> kNames = {"message", "think",    "response", "tools",
                                                    "call",    "argument", "json"};
// A longer tag is a control token that the model set by mistake, before text.
constexpr size_t kMaxTagBytes = 1 << 16;

bool is_key_byte(char byte) {
  return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') || byte == '_' || byte == '-';
}

bool is_name(std::string_view text) {
  return std::find(kNames.begin(), kNames.end(), text) != kNames.end();
}

}  // namespace

bool ReplyTag::push(char byte) {
  text_ += byte;
  if (text_.size() > kMaxTagBytes) return false;
  const auto begin_key = [&] {
    state_ = State::kKey;
    attributes_.emplace_back();
    return true;
  };
  switch (state_) {
    case State::kName:
      if (byte == ' ' && opening_ && is_name(name_)) return begin_key();
      name_ += byte;
      return std::any_of(kNames.begin(), kNames.end(), [&](std::string_view name) { return name.starts_with(name_); });
    case State::kKey:
      if (byte == '=' && !attributes_.back().first.empty()) {
        state_ = State::kQuote;
        return true;
      }
      attributes_.back().first += byte;
      return is_key_byte(byte);
    case State::kQuote:
      state_ = State::kValue;
      return byte == '"';
    case State::kValue:
      if (byte == '"') {
        state_ = State::kAfterValue;
      } else {
        attributes_.back().second += byte;
      }
      return true;
    case State::kAfterValue:
      return byte == ' ' && begin_key();
  }
  return false;
}

bool ReplyTag::is_complete() const {
  return state_ == State::kAfterValue || (state_ == State::kName && is_name(name_));
}

std::string ReplyTag::attribute(const std::string& key) const {
  for (const auto& [name, value] : attributes_) {
    if (name == key) return unescape_attribute(value);
  }
  return {};
}

}  // namespace furlong
