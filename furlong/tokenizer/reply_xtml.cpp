// Replies of Kimi K3. An element that is open when a tag comes that cannot stand in it is closed by that tag; only the
// end of the reply leaves a call unfinished. Text where no text belongs is content.

#include <algorithm>
#include <optional>

#include "furlong/base/json.h"
#include "furlong/tokenizer/reply_sink.h"
#include "furlong/tokenizer/reply_tag.h"
#include "furlong/tokenizer/utf8.h"

namespace furlong {

namespace {

using Kind = ReplyEvent::Kind;
constexpr std::string_view kSpaces = " \t\r\n";

std::string json_string(const std::string& text) {
  return Json(replace_invalid_utf8(text)).dump();
}

/// The arguments of one call, from tags to JSON text.
class Arguments {
 public:
  explicit Arguments(ReplySink& sink) : sink_(sink) {}

  void begin_call(const std::string& tool) {
    sink_.begin_call({}, tool);
    named_ = !tool.empty();
    count_ = 0;
    raw_ = false;
  }
  void begin(const std::string& key, const std::string& type) {
    is_string_ = type.empty() || type == "string";
    const char* before = count_++ == 0 && !raw_ ? "{" : ", ";
    sink_.text(Kind::kCallArguments, before + json_string(key) + (is_string_ ? ": \"" : ": "));
    value_.clear();
  }
  /// Strings pass through; other values wait until it is known that they are JSON.
  void text(std::string_view bytes) {
    if (is_string_) {
      sink_.string_argument(bytes);
    } else {
      value_ += bytes;
    }
  }
  void end() {
    if (is_string_) return sink_.text(Kind::kCallArguments, "\"");
    sink_.text(Kind::kCallArguments, Json::accept(value_) ? value_ : json_string(value_));
  }
  /// A value that was cut off is shown as it is.
  void cut() {
    if (!is_string_) sink_.text(Kind::kCallArguments, value_);
  }
  /// The arguments as one text, in place of tags.
  void begin_raw() {
    whole_ = count_ == 0 && !raw_;
    raw_ = true;
  }
  void raw_text(std::string_view bytes) { sink_.text(Kind::kCallArguments, bytes); }
  void end_call() {
    if (!raw_) sink_.text(Kind::kCallArguments, count_ == 0 ? "{}" : "}");
    sink_.end_call(named_ && (!raw_ || (whole_ && count_ == 0)));
  }

 private:
  ReplySink& sink_;
  bool named_ = false, is_string_ = false, raw_ = false, whole_ = false;
  int64_t count_ = 0;
  std::string value_;
};

class XtmlMachine : public ReplyMachine {
 public:
  XtmlMachine(const Tokenizer& tokenizer, const ReplyOptions& options)
      : ReplyMachine(tokenizer, options),
        open_(id_of("<|open|>")),
        close_(id_of("<|close|>")),
        sep_(id_of("<|sep|>")),
        end_(id_of("<|end_of_msg|>")),
        document_end_(id_of("[EOS]")),
        place_(options.thinking ? Place::kThink : Place::kResponse),
        arguments_(sink) {}

  void push(int64_t id) override {
    const std::string_view bytes = tokenizer.token_bytes(id);
    if (!tokenizer.is_special(id)) {
      text(bytes);
    } else if (id == open_ || id == close_) {
      end_tag();
      tag_.emplace(id == open_);
    } else if (id == sep_) {
      end_tag();
    } else if (id == end_ || id == document_end_) {
      if (tag_ && tag_->is_complete()) end_tag();
      tag_.reset();
      cut_call();
      sink.end(true);
    }
  }

  void finish() override {
    tag_.reset();
    cut_call();
    sink.end(false);
  }

 private:
  enum class Place { kThink, kResponse, kOutside, kTools, kCall, kArgument, kRaw };

  void text(std::string_view bytes) {
    while (tag_ && !bytes.empty()) {
      const bool is_tag = tag_->push(bytes.front());
      bytes.remove_prefix(1);
      if (!is_tag) drop_tag();
    }
    channel_text(bytes);
  }

  /// What followed a control token was no tag but text.
  void drop_tag() {
    const std::string text = tag_->text();
    tag_.reset();
    channel_text(text);
  }

  void channel_text(std::string_view bytes) {
    switch (place_) {
      case Place::kThink:
        return sink.text(Kind::kReasoning, bytes);
      case Place::kResponse:
        return sink.text(Kind::kContent, bytes);
      case Place::kArgument:
        return arguments_.text(bytes);
      case Place::kRaw:
        return arguments_.raw_text(bytes);
      default:
        break;
    }
    if (after_tag_) bytes.remove_prefix(std::min(bytes.find_first_not_of(kSpaces), bytes.size()));
    if (bytes.empty()) return;
    after_tag_ = false;
    sink.text(Kind::kContent, bytes);
  }

  void end_tag() {
    if (!tag_) return;
    if (!tag_->is_complete()) return drop_tag();
    const ReplyTag tag = *std::exchange(tag_, std::nullopt);
    after_tag_ = true;
    sink.flush();
    tag.opening() ? opened(tag) : closed(tag.name());
  }

  bool in_call() const { return place_ == Place::kCall || place_ == Place::kArgument || place_ == Place::kRaw; }

  void leave_argument() {
    if (place_ == Place::kArgument) arguments_.end();
    if (in_call()) place_ = Place::kCall;
  }

  void leave_call() {
    leave_argument();
    if (!in_call()) return;
    arguments_.end_call();
    place_ = Place::kTools;
  }

  void cut_call() {
    if (place_ == Place::kArgument) arguments_.cut();
    if (in_call()) sink.end_call(false);
    place_ = in_call() ? Place::kOutside : place_;
  }

  void opened(const ReplyTag& tag) {
    const std::string& name = tag.name();
    if (name == "argument" || name == "json") {
      if (!in_call()) return;  // its text goes where the text around it goes
      leave_argument();
      const bool raw = name == "json";
      raw ? arguments_.begin_raw() : arguments_.begin(tag.attribute("key"), tag.attribute("type"));
      place_ = raw ? Place::kRaw : Place::kArgument;
      return;
    }
    leave_call();
    sink.decide_reasoning();  // another channel closes the thinking
    if (name == "call") {
      arguments_.begin_call(tag.attribute("tool"));
      place_ = Place::kCall;
    } else {
      place_ = name == "think"      ? Place::kThink
               : name == "response" ? Place::kResponse
               : name == "tools"    ? Place::kTools
                                    : Place::kOutside;
    }
  }

  void closed(const std::string& name) {
    if (name == "argument" || name == "json") return leave_argument();
    if (name == "call") return leave_call();
    if (name == "think") {
      if (place_ != Place::kThink) return;
      sink.decide_reasoning();
    } else if (name == "response") {
      // In the first channel, this tag alone tells that it was the answer.
      if (place_ != Place::kThink && place_ != Place::kResponse) return;
      sink.decide_content();
    } else if (name == "tools") {
      if (place_ != Place::kTools && !in_call()) return;
      leave_call();
    } else {
      leave_call();
      sink.decide_content();
    }
    place_ = Place::kOutside;
  }

  int64_t open_, close_, sep_, end_, document_end_;
  Place place_;
  Arguments arguments_;
  std::optional<ReplyTag> tag_;
  bool after_tag_ = true;  // nothing but space has come since the last tag
};

}  // namespace

std::unique_ptr<ReplyMachine> xtml_machine(const Tokenizer& tokenizer, const ReplyOptions& options) {
  return std::make_unique<XtmlMachine>(tokenizer, options);
}

}  // namespace furlong
