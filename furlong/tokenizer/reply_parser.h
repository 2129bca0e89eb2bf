#pragma once

// What a model says, token by token, into reasoning, content and tool calls. Structure is decided by token ids alone:
// text that looks like markup stays text. The parser is a function of the ids, so their grouping into calls of push
// changes nothing, and what a reader adds up from the events is what `reply` holds.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "furlong/tokenizer/chat_template.h"
#include "furlong/tokenizer/tokenizer.h"

namespace furlong {

/// All text is valid UTF-8: bytes that are none become U+FFFD.
struct ReplyCall {
  std::string id;  // as the model wrote it; "functions.NAME:NUMBER" where the format has none
  std::string name;
  std::string arguments;  // JSON text; where the model gave one text in place of values, that text as it is
};

struct Reply {
  std::string reasoning;
  std::string content;
  std::vector<ReplyCall> tool_calls;
  /// Cut off by the end of the reply, or malformed (no tool's name): not to be carried out, kept for the reader.
  std::vector<ReplyCall> unfinished_calls;
  bool ended = false;  // the model closed its turn; false: the reply was cut off
};

struct ReplyEvent {
  enum class Kind {
    kReasoning,           // `text` follows
    kContent,             // `text` follows
    kReasoningIsContent,  // all reasoning so far was the answer: the model never closed a thinking channel
    kCallBegin,           // of `call`, with id and name
    kCallArguments,       // `text` follows
    kCallEnd,             // `complete` tells whether it may be carried out
  };
  Kind kind;
  std::string text;
  int64_t call = 0;  // counts the calls of the reply from 0
  std::string id, name;
  bool complete = false;
};

struct ReplyOptions {
  /// Whether the prompt ended inside the thinking channel (K3; the K2 family has none and ignores it).
  bool thinking = true;
  /// Text of the thinking channel is held until it is known to be reasoning, so that kReasoningIsContent never comes:
  /// for readers that cannot take back what they have sent.
  bool hold_undecided = false;
  /// Calls of earlier turns: made-up ids count from here.
  int64_t calls_before = 0;
};

class ReplyMachine;

class ReplyParser {
 public:
  /// The tokenizer must outlive the parser.
  ReplyParser(const Tokenizer& tokenizer, ChatFormat format, const ReplyOptions& options = {});
  ReplyParser(ReplyParser&&) noexcept;
  ReplyParser& operator=(ReplyParser&&) noexcept;
  ~ReplyParser();

  /// The events of these tokens, neighbours of a kind joined. Ids after the end of the turn are ignored; UsageError
  /// when one is out of range.
  std::vector<ReplyEvent> push(std::span<const int64_t> ids);
  /// No more tokens will come: what is still held, and the end of an open call.
  std::vector<ReplyEvent> finish();
  const Reply& reply() const;

 private:
  std::unique_ptr<ReplyMachine> machine_;
};

/// A whole reply at once.
Reply parse_reply(const Tokenizer& tokenizer, ChatFormat format, std::span<const int64_t> ids,
                  const ReplyOptions& options = {});

}  // namespace furlong
