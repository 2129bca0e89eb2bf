#include "furlong/tokenizer/chat.h"

#include <algorithm>
#include <utility>

#include "furlong/base/config.h"
#include "furlong/base/error.h"
#include "furlong/tokenizer/exact_json.h"

namespace furlong {

namespace {

const std::vector<std::string> kOptions = {"messages",    "tools",           "thinking",      "thinking_effort",
                                           "tool_choice", "response_format", "image_prompts", "add_generation_prompt"};

/// A value and the path that leads to it, for messages.
class Field {
 public:
  Field(const OrderedJson& value, std::string path) : value_(value), path_(std::move(path)) {}

  const OrderedJson& value() const { return value_; }
  [[noreturn]] void refuse(const std::string& fault) const { throw FormatError(path_ + ": " + fault); }
  const OrderedJson& need(bool holds, const char* what) const {
    if (!holds) refuse(std::string("got ") + value_.type_name() + ", need " + what);
    return value_;
  }

  std::string text() const { return need(value_.is_string(), "a text").get<std::string>(); }
  bool flag() const { return need(value_.is_boolean(), "true or false").get<bool>(); }
  const OrderedJson& object() const { return need(value_.is_object(), "an object"); }
  /// A member that is there and not null.
  std::optional<Field> find(const char* key) const {
    const auto found = object().find(key);
    if (found == value_.end() || found->is_null()) return std::nullopt;
    return Field(*found, path_ + "." + key);
  }
  Field at(const char* key) const {
    if (auto field = find(key)) return *field;
    refuse(std::string("has no '") + key + "'");
  }
  std::string text_or_empty(const char* key) const {
    const auto field = find(key);
    return field ? field->text() : std::string();
  }
  template <typename Call>
  void each(const Call& call) const {
    need(value_.is_array(), "a list");
    for (size_t i = 0; i < value_.size(); ++i) call(Field(value_[i], path_ + "[" + std::to_string(i) + "]"));
  }
  /// The value among named ones.
  template <typename Value>
  Value choice(const std::vector<std::pair<std::string, Value>>& choices) const {
    const std::string got = text();
    std::string names;
    for (const auto& [name, value] : choices) {
      if (name == got) return value;
      names += (names.empty() ? "" : ", ") + name;
    }
    refuse("got '" + got + "', need one of " + names);
  }

 private:
  const OrderedJson& value_;
  std::string path_;
};

bool is_blank(const std::string& text) {
  return text.find_first_not_of(" \t\n\r\f\v") == std::string::npos;
}

ContentPart parse_part(const Field& field) {
  const Field type = field.at("type");
  const bool image = type.choice<bool>({{"text", false}, {"image", true}, {"image_url", true}});
  return {image ? std::string() : field.at("text").text(), image};
}

std::vector<ContentPart> parse_content(const Field& message) {
  std::vector<ContentPart> parts;
  const auto content = message.find("content");
  if (!content) return parts;
  if (content->value().is_string()) return {{content->text()}};
  content->need(content->value().is_array(), "a text or a list of parts");
  content->each([&](const Field& part) { parts.push_back(parse_part(part)); });
  return parts;
}

/// A list of objects.
OrderedJson parse_tools(const Field& tools) {
  tools.each([](const Field& tool) { tool.object(); });
  return tools.value();
}

ChatToolCall parse_call(const Field& field) {
  ChatToolCall call;
  call.id = field.text_or_empty("id");
  const Field function = field.at("function");
  call.name = function.at("name").text();
  if (call.name.empty()) function.at("name").refuse("is empty");
  const auto arguments = function.find("arguments");
  if (!arguments) return call;
  if (!arguments->value().is_string()) {
    call.arguments = arguments->need(arguments->value().is_object(), "an object or a text");
    return call;
  }
  call.text = arguments->text();
  if (is_blank(call.text)) return call;
  try {
    call.arguments = parse_exact_json(call.text, "arguments");
  } catch (const FormatError&) {
    call.parsed = false;
    return call;
  }
  if (!call.arguments.is_object()) {
    arguments->refuse(std::string("holds a JSON ") + call.arguments.type_name() + ", need an object");
  }
  return call;
}

ChatMessage parse_message(const Field& field) {
  ChatMessage message;
  message.role = field.at("role").choice<ChatRole>({{"system", ChatRole::kSystem},
                                                    {"user", ChatRole::kUser},
                                                    {"assistant", ChatRole::kAssistant},
                                                    {"tool", ChatRole::kTool}});
  message.name = field.text_or_empty("name");
  message.content = parse_content(field);
  if (message.role == ChatRole::kSystem) {
    if (const auto tools = field.find("tools")) message.tools = parse_tools(*tools);
  } else if (message.role == ChatRole::kAssistant) {
    message.reasoning = field.text_or_empty("reasoning_content");
    if (message.reasoning.empty()) message.reasoning = field.text_or_empty("reasoning");
    if (is_blank(message.reasoning)) message.reasoning.clear();
    if (const auto calls = field.find("tool_calls")) {
      calls->each([&](const Field& call) { message.tool_calls.push_back(parse_call(call)); });
    }
  } else if (message.role == ChatRole::kTool) {
    message.tool_call_id = field.text_or_empty("tool_call_id");
    message.tool = field.text_or_empty("tool");
  }
  return message;
}

void parse_response_format(const Field& field, ChatRequest& request) {
  request.response_format = field.at("type").choice<ResponseFormat>({{"text", ResponseFormat::kText},
                                                                     {"json_object", ResponseFormat::kJsonObject},
                                                                     {"json_schema", ResponseFormat::kJsonSchema}});
  if (request.response_format == ResponseFormat::kJsonSchema) {
    request.schema = field.at("json_schema").at("schema").object();
  }
}

void parse_options(const Field& chat, ChatRequest& request) {
  if (const auto tools = chat.find("tools")) {
    request.tools = parse_tools(*tools);
    if (request.tools.empty()) request.tools = nullptr;
  }
  if (const auto thinking = chat.find("thinking")) request.thinking = thinking->flag();
  if (const auto effort = chat.find("thinking_effort")) {
    request.thinking_effort =
        effort->choice<std::string>({{"low", "low"}, {"medium", "medium"}, {"high", "high"}, {"max", "max"}});
  }
  if (const auto choice = chat.find("tool_choice")) {
    request.tool_choice = choice->choice<ToolChoice>(
        {{"auto", ToolChoice::kAuto}, {"none", ToolChoice::kNone}, {"required", ToolChoice::kRequired}});
  }
  if (const auto format = chat.find("response_format")) parse_response_format(*format, request);
  if (const auto add = chat.find("add_generation_prompt")) request.add_generation_prompt = add->flag();
  if (const auto prompts = chat.find("image_prompts")) {
    request.image_prompts.emplace();
    prompts->each([&](const Field& prompt) { request.image_prompts->push_back(prompt.text()); });
  }
}

}  // namespace

ChatRequest parse_chat(std::string_view text, const std::string& where) {
  const OrderedJson json = parse_exact_json(text, where);
  const Field chat(json, where);
  for (const auto& [key, value] : chat.object().items()) {
    if (std::find(kOptions.begin(), kOptions.end(), key) != kOptions.end()) continue;
    const std::string close = closest_word(key, kOptions);
    chat.refuse("unknown option '" + key + "'" + (close.empty() ? "" : " (did you mean '" + close + "'?)"));
  }
  ChatRequest request;
  parse_options(chat, request);
  chat.at("messages").each([&](const Field& message) { request.messages.push_back(parse_message(message)); });
  return request;
}

}  // namespace furlong
