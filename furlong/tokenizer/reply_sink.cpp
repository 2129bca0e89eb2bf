#include "furlong/tokenizer/reply_sink.h"

#include <utility>

#include "furlong/base/json.h"
#include "furlong/tokenizer/utf8.h"

namespace furlong {

void ReplySink::text(Kind kind, std::string_view bytes) {
  append(kind, Mode::kPlain, bytes);
}

void ReplySink::string_argument(std::string_view bytes) {
  append(Kind::kCallArguments, Mode::kEscaped, bytes);
}

void ReplySink::append(Kind kind, Mode mode, std::string_view bytes) {
  if (bytes.empty()) return;
  if (kind != kind_ || mode != mode_) flush();
  kind_ = kind;
  mode_ = mode;
  pending_ += bytes;
  const size_t tail = incomplete_utf8_tail(pending_);
  const std::string whole = pending_.substr(0, pending_.size() - tail);
  pending_.erase(0, whole.size());
  deliver(whole);
}

void ReplySink::flush() {
  deliver(std::exchange(pending_, {}));
}

void ReplySink::deliver(const std::string& bytes) {
  if (bytes.empty()) return;
  std::string text = replace_invalid_utf8(bytes);
  if (mode_ == Mode::kEscaped) {
    text = Json(text).dump();
    text = text.substr(1, text.size() - 2);
  }
  if (kind_ == Kind::kReasoning && undecided_ && options_.hold_undecided) {
    held_ += text;
  } else {
    emit({kind_, text, kind_ == Kind::kCallArguments ? calls_ - 1 : 0, {}, {}, false});
  }
}

void ReplySink::begin_call(std::string id, const std::string& name) {
  flush();
  if (id.empty()) id = "functions." + name + ":" + std::to_string(options_.calls_before + calls_);
  ++calls_;
  emit({Kind::kCallBegin, {}, calls_ - 1, replace_invalid_utf8(id), replace_invalid_utf8(name), false});
}

void ReplySink::end_call(bool complete) {
  flush();
  emit({Kind::kCallEnd, {}, calls_ - 1, {}, {}, complete});
}

void ReplySink::decide_reasoning() {
  if (!undecided_) return;
  flush();
  undecided_ = false;
  if (!held_.empty()) emit({Kind::kReasoning, std::exchange(held_, {}), 0, {}, {}, false});
}

void ReplySink::decide_content() {
  if (!undecided_) return;
  flush();
  undecided_ = false;
  if (!held_.empty()) {
    emit({Kind::kContent, std::exchange(held_, {}), 0, {}, {}, false});
  } else if (!reply_.reasoning.empty()) {
    emit({Kind::kReasoningIsContent, {}, 0, {}, {}, false});
  }
}

void ReplySink::end(bool by_model) {
  flush();
  // A whole reply without a channel of its own is the answer; one that was cut off was still thinking.
  by_model ? decide_content() : decide_reasoning();
  ended_ = true;
  reply_.ended = by_model;
}

void ReplySink::emit(ReplyEvent event) {
  apply(event);
  const bool is_text =
      event.kind == Kind::kReasoning || event.kind == Kind::kContent || event.kind == Kind::kCallArguments;
  if (is_text && !events_.empty() && events_.back().kind == event.kind && events_.back().call == event.call) {
    events_.back().text += event.text;
  } else {
    events_.push_back(std::move(event));
  }
}

void ReplySink::apply(const ReplyEvent& event) {
  switch (event.kind) {
    case Kind::kReasoning:
      reply_.reasoning += event.text;
      break;
    case Kind::kContent:
      reply_.content += event.text;
      break;
    case Kind::kReasoningIsContent:
      reply_.content += std::exchange(reply_.reasoning, {});
      break;
    case Kind::kCallBegin:
      open_call_ = {event.id, event.name, {}};
      break;
    case Kind::kCallArguments:
      open_call_.arguments += event.text;
      break;
    case Kind::kCallEnd:
      (event.complete ? reply_.tool_calls : reply_.unfinished_calls).push_back(std::move(open_call_));
      break;
  }
}

}  // namespace furlong
