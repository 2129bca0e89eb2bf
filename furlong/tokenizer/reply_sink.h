#pragma once

// The common end of the reply machines: bytes in, events and the adding-up of events out. Holds back bytes of an
// incomplete character, and the first channel's text while its kind is open.

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "furlong/tokenizer/reply_parser.h"

namespace furlong {

class ReplySink {
 public:
  using Kind = ReplyEvent::Kind;

  explicit ReplySink(const ReplyOptions& options) : options_(options), undecided_(options.thinking) {}

  /// Bytes of kReasoning, kContent or kCallArguments. Another kind than before ends an incomplete character.
  void text(Kind kind, std::string_view bytes);
  /// Bytes of a JSON string inside the arguments, to be escaped.
  void string_argument(std::string_view bytes);

  /// An empty id is made up.
  void begin_call(std::string id, const std::string& name);
  void end_call(bool complete);

  /// The first channel turned out to be reasoning, or the answer. Only the first decision counts.
  void decide_reasoning();
  void decide_content();
  bool undecided() const { return undecided_; }

  /// Ends an incomplete character.
  void flush();
  void end(bool by_model);
  bool has_ended() const { return ended_; }

  std::vector<ReplyEvent> take() { return std::exchange(events_, {}); }
  const Reply& reply() const { return reply_; }

 private:
  enum class Mode { kPlain, kEscaped };
  void append(Kind kind, Mode mode, std::string_view bytes);
  void deliver(const std::string& bytes);
  void emit(ReplyEvent event);
  void apply(const ReplyEvent& event);

  ReplyOptions options_;
  bool undecided_;
  bool ended_ = false;
  std::string held_;  // text of the first channel, while it is held
  Kind kind_ = Kind::kContent;
  Mode mode_ = Mode::kPlain;
  std::string pending_;  // bytes of kind_ that are no whole character yet
  int64_t calls_ = 0;
  ReplyCall open_call_;
  Reply reply_;
  std::vector<ReplyEvent> events_;
};

/// One format's grammar.
class ReplyMachine {
 public:
  ReplyMachine(const Tokenizer& vocabulary, const ReplyOptions& options) : sink(options), tokenizer(vocabulary) {}
  virtual ~ReplyMachine() = default;
  virtual void push(int64_t id) = 0;
  virtual void finish() = 0;

  ReplySink sink;

 protected:
  /// -1 when the table has no such token.
  int64_t id_of(const char* name) const { return tokenizer.special_id(name).value_or(-1); }

  const Tokenizer& tokenizer;
};

std::unique_ptr<ReplyMachine> xtml_machine(const Tokenizer& tokenizer, const ReplyOptions& options);
std::unique_ptr<ReplyMachine> turns_machine(const Tokenizer& tokenizer, const ReplyOptions& options);

}  // namespace furlong
