#pragma once

// A conversation to be rendered: messages and options in the form of the chat APIs, read from JSON and checked.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "furlong/base/json.h"

namespace furlong {

enum class ChatRole { kSystem, kUser, kAssistant, kTool };

struct ContentPart {
  std::string text;
  bool image = false;  // then `text` is empty
};

struct ChatToolCall {
  std::string id;  // may be empty
  std::string name;
  OrderedJson arguments = OrderedJson::object();  // of parse_exact_json
  std::string text;                               // the arguments as they came, where they were a text
  bool parsed = true;                             // false: `text` is no JSON
};

struct ChatMessage {
  ChatRole role = ChatRole::kUser;
  std::string name;
  std::vector<ContentPart> content;
  std::string reasoning;                 // assistant
  std::vector<ChatToolCall> tool_calls;  // assistant
  OrderedJson tools;                     // system: an array of further tools, or null
  std::string tool_call_id, tool;        // tool: the call that this answers, the tool's name
};

enum class ToolChoice { kAuto, kNone, kRequired };
enum class ResponseFormat { kText, kJsonObject, kJsonSchema };

struct ChatRequest {
  std::vector<ChatMessage> messages;
  OrderedJson tools;             // an array, or null
  std::optional<bool> thinking;  // unset: the model's own way
  std::string thinking_effort;   // low, medium, high, max; empty: none is stated
  ToolChoice tool_choice = ToolChoice::kAuto;
  ResponseFormat response_format = ResponseFormat::kText;
  OrderedJson schema;  // of kJsonSchema
  bool add_generation_prompt = true;
  /// The media sequences of the images in their order, once they are known.
  std::optional<std::vector<std::string>> image_prompts;
};

/// Reads {"messages": [...], "tools": [...], "thinking": ..., "thinking_effort": ..., "tool_choice": ...,
/// "response_format": ..., "add_generation_prompt": ..., "image_prompts": [...]}; all but messages may be missing.
/// FormatError names `where` and the place: an unknown option or role, a wrong type, tool arguments that are JSON but
/// no object. Keys of messages that mean nothing to a prompt are ignored.
ChatRequest parse_chat(std::string_view text, const std::string& where);

}  // namespace furlong
