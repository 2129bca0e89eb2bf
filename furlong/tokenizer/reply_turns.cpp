// Replies of the K2 family: text, then a section of calls "functions.NAME:NUMBER" with JSON arguments.

#include <algorithm>

#include "furlong/tokenizer/reply_sink.h"

namespace furlong {

namespace {

constexpr std::string_view kSpaces = " \t\r\n";

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(kSpaces);
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpaces) - begin + 1);
}

/// "functions.get_weather:0": get_weather.
std::string name_of(const std::string& id) {
  constexpr std::string_view kPrefix = "functions.";
  const size_t begin = id.starts_with(kPrefix) ? kPrefix.size() : 0;
  const size_t colon = id.rfind(':');
  const bool numbered =
      colon != std::string::npos && colon > begin && colon + 1 < id.size() &&
      std::all_of(id.begin() + static_cast<int64_t>(colon) + 1, id.end(), [](char c) { return c >= '0' && c <= '9'; });
  return id.substr(begin, numbered ? colon - begin : std::string::npos);
}

class TurnsMachine : public ReplyMachine {
 public:
  TurnsMachine(const Tokenizer& tokenizer, const ReplyOptions& options)
      : ReplyMachine(tokenizer, options),
        end_(id_of("<|im_end|>")),
        document_end_(id_of("[EOS]")),
        section_begin_(id_of("<|tool_calls_section_begin|>")),
        section_end_(id_of("<|tool_calls_section_end|>")),
        call_begin_(id_of("<|tool_call_begin|>")),
        argument_begin_(id_of("<|tool_call_argument_begin|>")),
        call_end_(id_of("<|tool_call_end|>")) {}

  void push(int64_t id) override {
    const std::string_view bytes = tokenizer.token_bytes(id);
    if (!tokenizer.is_special(id)) return text(bytes);
    if (id == end_ || id == document_end_) {
      leave_call(false);
      sink.end(true);
    } else if (id == section_begin_ || (id == call_end_ && place_ != Place::kContent)) {
      go(Place::kSection);
    } else if (id == section_end_) {
      go(Place::kContent);
    } else if (id == call_begin_) {
      go(Place::kId);
    } else if (id == argument_begin_ && place_ == Place::kId) {
      begin_call();
    }
  }

  void finish() override {
    leave_call(false);
    sink.end(false);
  }

 private:
  enum class Place { kContent, kSection, kId, kArguments };

  void text(std::string_view bytes) {
    if (place_ == Place::kId) {
      id_ += bytes;
      return;
    }
    // Around calls and before arguments, space means nothing; anything else is kept.
    if (place_ != Place::kContent && at_start_) {
      bytes.remove_prefix(std::min(bytes.find_first_not_of(kSpaces), bytes.size()));
      if (bytes.empty()) return;
      at_start_ = false;
    }
    sink.text(place_ == Place::kArguments ? ReplySink::Kind::kCallArguments : ReplySink::Kind::kContent, bytes);
  }

  void go(Place place) {
    leave_call(true);
    place_ = place;
    at_start_ = true;
  }

  void begin_call() {
    const std::string id = trimmed(id_);
    id_.clear();
    sink.begin_call(id, name_of(id));
    named_ = !name_of(id).empty();
    place_ = Place::kArguments;
    at_start_ = true;
  }

  /// A call without its argument token was never whole.
  void leave_call(bool complete) {
    if (place_ == Place::kId) {
      if (trimmed(id_).empty()) return id_.clear();
      begin_call();
      complete = false;
    }
    if (place_ != Place::kArguments) return;
    if (at_start_ && complete) sink.text(ReplySink::Kind::kCallArguments, "{}");
    sink.end_call(complete && named_);
    place_ = Place::kSection;
  }

  int64_t end_, document_end_, section_begin_, section_end_, call_begin_, argument_begin_, call_end_;
  Place place_ = Place::kContent;
  bool at_start_ = false;  // nothing but space has come since the last control token
  bool named_ = false;
  std::string id_;
};

}  // namespace

std::unique_ptr<ReplyMachine> turns_machine(const Tokenizer& tokenizer, const ReplyOptions& options) {
  ReplyOptions own = options;
  own.thinking = false;
  return std::make_unique<TurnsMachine>(tokenizer, own);
}

}  // namespace furlong
