// The K2 family: a role token, the role's word, <|im_middle|>, the text, <|im_end|>. No message is added that the
// conversation does not hold, and reasoning of earlier turns is left out: these models have no channel for it.

#include "furlong/base/error.h"
#include "furlong/tokenizer/exact_json.h"
#include "furlong/tokenizer/render.h"

namespace furlong {

namespace {

class Turns {
 public:
  void begin(const char* role_token, const std::string& word) {
    special(role_token);
    text(word);
    special("<|im_middle|>");
  }
  void end() { special("<|im_end|>"); }
  void special(const char* name) { segments.push_back({name, true, trained}); }
  void text(const std::string& text) {
    if (!text.empty()) segments.push_back({text, false, trained});
  }

  bool trained = false;
  std::vector<TextSegment> segments;
};

void refuse_other_options(const ChatRequest& request) {
  const auto refuse = [](bool given, const char* option) {
    if (given) throw UsageError(std::string("[chat] ") + option + ": this model's prompt format has no such option");
  };
  refuse(request.thinking.value_or(false), "thinking");
  refuse(!request.thinking_effort.empty(), "thinking_effort");
  refuse(request.tool_choice != ToolChoice::kAuto, "tool_choice");
  refuse(request.response_format != ResponseFormat::kText, "response_format");
  refuse(request.image_prompts && !request.image_prompts->empty(), "image_prompts");
}

/// Calls without an id are numbered through the conversation, as the model does it.
void render_calls(Turns& turns, const ChatMessage& message, int64_t& calls) {
  if (message.tool_calls.empty()) return;
  turns.special("<|tool_calls_section_begin|>");
  for (const ChatToolCall& call : message.tool_calls) {
    const int64_t number = calls++;
    turns.special("<|tool_call_begin|>");
    turns.text(call.id.empty() ? "functions." + call.name + ":" + std::to_string(number) : call.id);
    turns.special("<|tool_call_argument_begin|>");
    turns.text(call.text.empty() ? exact_json_text(call.arguments, JsonStyle::kSpaced) : call.text);
    turns.special("<|tool_call_end|>");
  }
  turns.special("<|tool_calls_section_end|>");
}

void render_message(Turns& turns, const ChatMessage& message, const std::string& what, int64_t& calls) {
  const std::string text = plain_text(message, what);
  const auto word = [&](const char* role) { return message.name.empty() ? std::string(role) : message.name; };
  switch (message.role) {
    case ChatRole::kSystem:
      if (!message.tools.is_null()) throw UsageError("[chat] " + what + ".tools: this format declares tools once");
      turns.begin("<|im_system|>", word("system"));
      turns.text(text);
      break;
    case ChatRole::kUser:
      turns.begin("<|im_user|>", word("user"));
      turns.text(text);
      break;
    case ChatRole::kAssistant:
      turns.begin("<|im_assistant|>", word("assistant"));
      turns.trained = true;
      turns.text(text);
      render_calls(turns, message, calls);
      break;
    case ChatRole::kTool:
      if (message.tool_call_id.empty()) throw UsageError("[chat] " + what + ": a tool result needs a tool_call_id");
      turns.begin("<|im_system|>", word("tool"));
      turns.text("## Return of " + message.tool_call_id + "\n" + text);
      break;
  }
  turns.end();
  turns.trained = false;
}

}  // namespace

std::vector<TextSegment> render_turns(const ChatRequest& request) {
  refuse_other_options(request);
  Turns turns;
  if (!request.tools.is_null()) {
    turns.begin("<|im_system|>", "tool_declare");
    turns.text(exact_json_text(request.tools, JsonStyle::kCompact));
    turns.end();
  }
  int64_t calls = 0;
  for (size_t i = 0; i < request.messages.size(); ++i) {
    render_message(turns, request.messages[i], "messages[" + std::to_string(i) + "]", calls);
  }
  if (request.add_generation_prompt) turns.begin("<|im_assistant|>", "assistant");
  return std::move(turns.segments);
}

}  // namespace furlong
