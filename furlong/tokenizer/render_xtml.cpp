// Kimi K3: tags between control tokens. Every part of a tag is a segment of its own.

#include <algorithm>
#include <map>
#include <utility>

#include "furlong/base/error.h"
#include "furlong/tokenizer/chat_template.h"
#include "furlong/tokenizer/exact_json.h"
#include "furlong/tokenizer/interface_strings.h"
#include "furlong/tokenizer/render.h"

namespace furlong {

namespace {

using Attributes = std::vector<std::pair<std::string, std::string>>;
using Calls = std::vector<ChatToolCall>;
namespace fixed = interface_strings;

class Xtml {
 public:
  void open(const std::string& tag, const Attributes& attributes = {}) {
    special("<|open|>");
    text(tag);
    for (const auto& [key, value] : attributes) {
      text(" " + key);
      text("=\"");
      text(escape_attribute(value));
      text("\"");
    }
    special("<|sep|>");
  }
  void close(const std::string& tag) {
    special("<|close|>");
    text(tag);
    special("<|sep|>");
  }
  void end_message() {
    close("message");
    special("<|end_of_msg|>");
    trained = false;
  }
  /// A system message with a fixed body.
  void notice(const std::string& type, const std::string& body) {
    open("message", {{"role", "system"}, {"type", type}});
    text(body);
    end_message();
  }
  void element(const std::string& tag, const Attributes& attributes, const std::string& body) {
    open(tag, attributes);
    text(body);
    close(tag);
  }
  void special(const std::string& text) { segments.push_back({text, true, trained}); }
  void text(const std::string& text) {
    if (!text.empty()) segments.push_back({text, false, trained});
  }

  bool trained = false;
  std::vector<TextSegment> segments;
};

std::string fenced(std::string_view before, const OrderedJson& value) {
  return std::string(before) + exact_json_text(value, JsonStyle::kCompactSorted) + std::string(fixed::kFenceEnd);
}

size_t markers_in(const std::string& text) {
  size_t count = 0;
  for (size_t at = text.find(fixed::kImagePlaceholder); at != std::string::npos;
       at = text.find(fixed::kImagePlaceholder, at + 1)) {
    ++count;
  }
  return count;
}

/// Hands out the media sequences. Markers in text stand for images only where that accounts for every sequence, once;
/// where the image parts alone do, a marker is text like any other.
class Images {
 public:
  explicit Images(const ChatRequest& request) : prompts_(request.image_prompts) {
    size_t parts = 0, markers = 0;
    for (const ChatMessage& message : request.messages) {
      if (message.role == ChatRole::kAssistant) continue;  // what a model says is text
      for (const ContentPart& part : message.content) {
        part.image ? ++parts : markers += markers_in(part.text);
      }
    }
    if (!prompts_ || prompts_->size() == parts) return;
    in_text_ = prompts_->size() == parts + markers;
    if (in_text_) return;
    throw UsageError("[chat] image_prompts: got " + std::to_string(prompts_->size()) + " for " + std::to_string(parts) +
                     " image parts and " + std::to_string(markers) + " markers in texts, need one each");
  }

  void render(Xtml& xtml, const ContentPart& part) {
    if (part.image) return xtml.special(prompts_ ? (*prompts_)[next_++] : std::string(fixed::kImagePlaceholder));
    size_t begin = 0;
    while (in_text_) {
      const size_t at = part.text.find(fixed::kImagePlaceholder, begin);
      if (at == std::string::npos) break;
      xtml.text(part.text.substr(begin, at - begin));
      xtml.special((*prompts_)[next_++]);
      begin = at + fixed::kImagePlaceholder.size();
    }
    xtml.text(part.text.substr(begin));
  }

 private:
  const std::optional<std::vector<std::string>>& prompts_;
  bool in_text_ = false;
  size_t next_ = 0;
};

std::string type_name(const OrderedJson& value) {
  if (is_exact_number(value)) return "number";
  return value.type_name();  // string, boolean, null, object, array
}

void render_call(Xtml& xtml, const ChatToolCall& call, size_t number) {
  xtml.open("call", {{"tool", call.name}, {"index", std::to_string(number)}});
  if (!call.parsed) xtml.element("json", {{"type", "object"}}, call.text);
  for (const auto& [key, value] : call.arguments.items()) {
    xtml.element("argument", {{"key", key}, {"type", type_name(value)}},
                 value.is_string() ? value.get<std::string>() : exact_json_text(value, JsonStyle::kSpaced));
  }
  xtml.close("call");
}

void render_assistant(Xtml& xtml, const ChatMessage& message, bool thinking, const std::string& what) {
  xtml.trained = true;
  if (thinking) xtml.element("think", {}, message.reasoning);
  xtml.element("response", {}, plain_text(message, what));
  if (message.tool_calls.empty()) return;
  xtml.open("tools");
  for (size_t i = 0; i < message.tool_calls.size(); ++i) render_call(xtml, message.tool_calls[i], i + 1);
  xtml.close("tools");
}

/// A run of tool results: in the order of the calls when every id is one of theirs, else as they came.
void render_results(Xtml& xtml, Images& images, const Calls& calls, const ChatMessage* first, size_t count) {
  std::map<std::string, size_t> call_of;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (!calls[i].id.empty()) call_of.emplace(calls[i].id, i);
  }
  std::vector<const ChatMessage*> results;
  for (size_t i = 0; i < count; ++i) results.push_back(first + i);
  const auto is_known = [&](const ChatMessage* result) { return call_of.count(result->tool_call_id) > 0; };
  if (std::all_of(results.begin(), results.end(), is_known)) {
    std::stable_sort(results.begin(), results.end(), [&](const ChatMessage* a, const ChatMessage* b) {
      return call_of[a->tool_call_id] < call_of[b->tool_call_id];
    });
  }
  for (size_t i = 0; i < count; ++i) {
    const ChatMessage& result = *results[i];
    std::string tool = result.tool.empty() ? result.name : result.tool;
    if (is_known(&result)) tool = calls[call_of[result.tool_call_id]].name;
    if (tool.empty() && i < calls.size()) tool = calls[i].name;
    if (tool.empty()) {
      throw UsageError("[chat] a tool result names no tool: need a tool_call_id of the calls before, 'tool' or 'name'");
    }
    xtml.open("message", {{"role", "tool"}, {"tool", tool}, {"index", std::to_string(i + 1)}});
    for (const ContentPart& part : result.content) images.render(xtml, part);
    xtml.end_message();
  }
}

void render_message(Xtml& xtml, Images& images, const ChatMessage& message, bool thinking, const std::string& what) {
  if (!message.tools.is_null()) {
    if (!plain_text(message, what).empty()) throw UsageError("[chat] " + what + ": got tools and content, need one");
    return xtml.notice("tool-declare", fenced(fixed::kDynamicToolDeclare, message.tools));
  }
  const bool assistant = message.role == ChatRole::kAssistant;
  Attributes attributes = {{"role", assistant ? "assistant" : message.role == ChatRole::kSystem ? "system" : "user"}};
  if (!message.name.empty()) attributes.emplace_back("name", message.name);
  xtml.open("message", attributes);
  if (assistant) {
    render_assistant(xtml, message, thinking, what);
  } else {
    for (const ContentPart& part : message.content) images.render(xtml, part);
  }
  xtml.end_message();
}

void render_messages(Xtml& xtml, const ChatRequest& request, bool thinking) {
  Images images(request);
  const auto& messages = request.messages;
  const Calls none;
  const Calls* calls = &none;  // of the last assistant message that had any
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role != ChatRole::kTool) {
      if (!messages[i].tool_calls.empty()) calls = &messages[i].tool_calls;
      render_message(xtml, images, messages[i], thinking, "messages[" + std::to_string(i) + "]");
      continue;
    }
    size_t end = i;
    while (end < messages.size() && messages[end].role == ChatRole::kTool) ++end;
    render_results(xtml, images, *calls, &messages[i], end - i);
    i = end - 1;
  }
}

}  // namespace

std::vector<TextSegment> render_xtml(const ChatRequest& request) {
  const bool thinking = request.thinking.value_or(true);
  Xtml xtml;
  if (!request.tools.is_null()) xtml.notice("tool-declare", fenced(fixed::kToolDeclare, request.tools));
  if (thinking && !request.thinking_effort.empty()) {
    xtml.notice("thinking-effort",
                std::string(fixed::kThinkingEffort) + request.thinking_effort + std::string(fixed::kThinkingEffortEnd));
  }
  render_messages(xtml, request, thinking);
  if (request.tool_choice == ToolChoice::kRequired) {
    xtml.notice("tool-choice", std::string(fixed::kToolChoiceRequired));
  } else if (request.tool_choice == ToolChoice::kNone) {
    xtml.notice("tool-choice", std::string(fixed::kToolChoiceNone));
  }
  if (request.response_format == ResponseFormat::kJsonObject) {
    xtml.notice("response-format", std::string(fixed::kJsonObject));
  } else if (request.response_format == ResponseFormat::kJsonSchema) {
    xtml.notice("response-format", fenced(fixed::kJsonSchema, request.schema));
  }
  if (request.add_generation_prompt) {
    xtml.open("message", {{"role", "assistant"}});
    xtml.open(thinking ? "think" : "response");
  }
  return std::move(xtml.segments);
}

}  // namespace furlong
