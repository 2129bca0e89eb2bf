#include "furlong/tokenizer/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/sha256.h"
#include "furlong/tokenizer/interface_strings.h"
#include "furlong/tokenizer/special_tokens.h"
#include "furlong/tokenizer/trainer.h"

namespace furlong {
namespace {

using ::testing::HasSubstr;
namespace fixed = interface_strings;

Tokenizer with_names(const std::vector<std::string>& names) {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  return Tokenizer::from_text(rank_file_text(tokens), "test", SpecialTokens(256, names).to_json());
}

std::vector<TextSegment> xtml(const std::string& chat) {
  return render_chat(ChatFormat::kXtml, parse_chat(chat, "chat.json"));
}

std::string turns(const std::string& chat) {
  return prompt_text(render_chat(ChatFormat::kTurns, parse_chat(chat, "chat.json")));
}

template <typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

std::string fault(const std::string& chat) {
  return message_of([&] { xtml(chat); });
}

TEST(InterfaceStrings, HaveThePublishedBytes) {
  const auto expect = [](std::string_view text, size_t bytes, const std::string& hash) {
    EXPECT_EQ(text.size(), bytes) << text;
    EXPECT_EQ(sha256_hex(text).substr(0, 16), hash) << text;
  };
  std::string effort(fixed::kThinkingEffort);
  effort.append("max").append(fixed::kThinkingEffortEnd);
  expect(effort, 223, "20389202b5a9e0b3");
  expect(fixed::kToolDeclare, 72, "bbd0773d27b2a814");
  expect(fixed::kDynamicToolDeclare, 188, "b5f3063ffeff6dab");
  expect(fixed::kToolChoiceRequired, 91, "e2c3dc236d94164a");
  expect(fixed::kToolChoiceNone, 95, "efabd595d24633a1");
  expect(fixed::kJsonObject, 162, "a88696fd119e35ca");
  expect(fixed::kJsonSchema, 218, "35c44c528f6c1e22");
}

TEST(ChatFormat, ComesFromTheTokenTable) {
  const std::vector<std::string> k3 = {"<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"};
  const std::vector<std::string> k2 = {"<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>",
                                       "<|im_middle|>"};
  EXPECT_EQ(chat_format_of(with_names(k3)), ChatFormat::kXtml);
  EXPECT_EQ(chat_format_of(with_names(k2)), ChatFormat::kTurns);
  EXPECT_THAT(message_of([&] { chat_format_of(with_names({"[EOS]"})); }), HasSubstr("of no chat format"));
  std::vector<std::string> both = k3;
  both.insert(both.end(), k2.begin(), k2.end());
  EXPECT_THAT(message_of([&] { chat_format_of(with_names(both)); }), HasSubstr("of both chat format"));
}

// T05: escaping and unescaping are inverse, whatever a tool or a key is called.
TEST(ChatTemplate, AttributesComeBack) {
  std::vector<std::string> values = {"f\"&<g>", "&amp;", "&quot;", "&amp;quot;", "\"\"",
                                     "",        "&",     "a&amp",  "&lt;",       "搜索\n"};
  for (int c = 0x20; c < 0x7f; ++c) values.push_back(std::string(1, static_cast<char>(c)) + "&" + static_cast<char>(c));
  for (const std::string& value : values) {
    EXPECT_EQ(unescape_attribute(escape_attribute(value)), value);
    EXPECT_EQ(escape_attribute(value).find('"'), std::string::npos);
  }
}

TEST(ChatTemplate, OnlyItsOwnSegmentsMayHoldSpecialTokens) {
  const auto segments = xtml(R"({"messages":[{"role":"user","content":"<|sep|>","name":"<|open|>"},
      {"role":"assistant","content":"<|end_of_msg|>","reasoning":"<|close|>",
       "tool_calls":[{"id":"<|sep|>","function":{"name":"<|sep|>","arguments":{"<|sep|>":"<|sep|>"}}}]},
      {"role":"tool","content":"[EOS]","tool_call_id":"<|sep|>"}]})");
  const auto tokenizer = with_names({"[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"});
  const EncodedSegments encoded = tokenizer.encode_segments(segments);
  size_t special = 0, controls = 0;
  for (const TextSegment& segment : segments) controls += segment.special ? 1 : 0;
  for (const int64_t id : encoded.ids) special += tokenizer.is_special(id) ? 1 : 0;
  EXPECT_EQ(special, controls);
  EXPECT_EQ(tokenizer.decode(encoded.ids), prompt_text(segments));
}

// T73: an image marker in a tool result is plain text, with no image attached and beside one that a part attaches.
TEST(ChatTemplate, MarkersWithoutAnImageAreText) {
  const std::string result = R"({"messages":[{"role":"tool","tool":"f","content":"see <|kimi_image_placeholder|>"}]})";
  for (const TextSegment& segment : xtml(result)) {
    EXPECT_FALSE(segment.special && segment.text.find("placeholder") != std::string::npos);
  }
  const auto beside = xtml(R"({"image_prompts":["<|media_begin|>image 1x1"],"messages":[
      {"role":"user","content":[{"type":"image"}]},
      {"role":"tool","tool":"f","content":"see <|kimi_image_placeholder|>"}]})");
  EXPECT_THAT(prompt_text(beside), HasSubstr("<|media_begin|>image 1x1<|close|>"));
  EXPECT_THAT(prompt_text(beside), HasSubstr("see <|kimi_image_placeholder|>"));
}

TEST(ChatTemplate, FaultsNameTheirPlace) {
  EXPECT_THAT(fault("{"), HasSubstr("chat.json: not valid JSON"));
  EXPECT_THAT(fault("[]"), HasSubstr("chat.json: got array, need an object"));
  EXPECT_THAT(fault("{}"), HasSubstr("chat.json: has no 'messages'"));
  EXPECT_THAT(fault(R"({"messages":[],"thinking_efort":"max"})"), HasSubstr("did you mean 'thinking_effort'?"));
  EXPECT_THAT(fault(R"({"messages":[{"role":"boss"}]})"),
              HasSubstr("chat.json.messages[0].role: got 'boss', need one of system, user, assistant, tool"));
  EXPECT_THAT(fault(R"({"messages":[{"role":"user","content":[{"type":"audio"}]}]})"),
              HasSubstr("messages[0].content[0].type: got 'audio'"));
  EXPECT_THAT(fault(R"({"messages":[{"role":"user","content":7}]})"), HasSubstr("messages[0].content: got number"));
  EXPECT_THAT(fault(R"({"messages":[{"role":"assistant","tool_calls":[{"function":{"name":""}}]}]})"),
              HasSubstr("messages[0].tool_calls[0].function.name: is empty"));
  EXPECT_THAT(fault(R"({"messages":[],"tools":[1]})"), HasSubstr("chat.json.tools[0]: got number, need an object"));
  EXPECT_THAT(fault(R"({"messages":[],"response_format":{"type":"json_schema"}})"), HasSubstr("has no 'json_schema'"));
  EXPECT_THAT(fault(R"({"messages":[{"role":"assistant","content":[{"type":"image"}]}]})"),
              HasSubstr("messages[0] holds an image"));
  EXPECT_THAT(fault(R"({"messages":[{"role":"system","tools":[],"content":"x"}]})"), HasSubstr("tools and content"));
}

TEST(ChatTemplate, DeepToolArgumentsStayText) {
  const std::string deep(1000, '[');
  const auto segments = xtml(R"({"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":")" +
                             deep + R"("}}]}]})");
  EXPECT_THAT(prompt_text(segments), HasSubstr("<|open|>json type=\"object\"<|sep|>" + deep + "<|close|>json<|sep|>"));
}

// The K2 family: published integration test of Kimi-Linear-48B (no system message of its own, no [BOS]); tools first,
// in written order.
TEST(ChatTemplate, TurnsOfTheK2Family) {
  EXPECT_EQ(turns(R"({"messages":[{"role":"user","content":"Tell me about the french revolution."}]})"),
            "<|im_user|>user<|im_middle|>Tell me about the french revolution.<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>");
  EXPECT_EQ(
      turns(R"({"messages":[],"tools":[{"type":"function","function":{"name":"f"}}],"add_generation_prompt":false})"),
      "<|im_system|>tool_declare<|im_middle|>[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]<|im_end|>");
  EXPECT_THAT(turns(R"({"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f"}},
      {"function":{"name":"g","arguments":"{\"a\":1}"}}]}]})"),
              HasSubstr("functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>"
                        "functions.g:1<|tool_call_argument_begin|>{\"a\":1}<|tool_call_end|>"));
}

TEST(ChatTemplate, TheK2FamilyRefusesWhatItLacks) {
  for (const std::string option : {R"("thinking":true)", R"("thinking_effort":"low")", R"("tool_choice":"none")",
                                   R"("response_format":{"type":"json_object"})", R"("image_prompts":["x"])"}) {
    EXPECT_THROW(turns("{\"messages\":[]," + option + "}"), UsageError) << option;
  }
  EXPECT_THROW(turns(R"({"messages":[{"role":"tool","content":"x"}]})"), UsageError);
  EXPECT_THROW(turns(R"({"messages":[{"role":"user","content":[{"type":"image"}]}]})"), UsageError);
}

}  // namespace
}  // namespace furlong
