#pragma once

// A tag between its control tokens, read byte by byte: a known name and, in opening tags, attributes.

#include <string>
#include <utility>
#include <vector>

namespace furlong {

class ReplyTag {
 public:
  explicit ReplyTag(bool opening) : opening_(opening) {}

  /// False when the bytes so far, this one included, begin no tag. The byte belongs to text() all the same.
  bool push(char byte);
  /// Whether the tag could end here.
  bool is_complete() const;

  bool opening() const { return opening_; }
  const std::string& text() const { return text_; }
  const std::string& name() const { return name_; }
  /// An attribute's value, unescaped; empty when there is none.
  std::string attribute(const std::string& key) const;

 private:
  enum class State { kName, kKey, kQuote, kValue, kAfterValue };

  bool opening_;
  State state_ = State::kName;
  std::string text_, name_;
  std::vector<std::pair<std::string, std::string>> attributes_;
};

}  // namespace furlong
