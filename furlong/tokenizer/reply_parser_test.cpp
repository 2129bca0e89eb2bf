#include "furlong/tokenizer/reply_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/json.h"
#include "furlong/base/rng.h"
#include "furlong/tokenizer/special_tokens.h"
#include "furlong/tokenizer/trainer.h"
#include "furlong/tokenizer/utf8.h"

namespace furlong {
namespace {

using ::testing::HasSubstr;
using Ids = std::vector<int64_t>;
using Kind = ReplyEvent::Kind;

Tokenizer with_names(const std::vector<std::string>& names) {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  for (const char* more : {"th", "ink", "response", "call", "\xf0\x9f", "=\"", "</", " tool"})
    tokens.emplace_back(more);
  return Tokenizer::from_text(rank_file_text(tokens), "test",
                              SpecialTokens(static_cast<int64_t>(tokens.size()), names).to_json());
}

const Tokenizer& k3() {
  static const Tokenizer tokenizer =
      with_names({"[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "<|media_pad|>", ""});
  return tokenizer;
}

const Tokenizer& k2() {
  static const Tokenizer tokenizer =
      with_names({"[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
                  "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                  "<|tool_call_argument_begin|>", "<|tool_call_end|>"});
  return tokenizer;
}

/// Tags in short: "[think]", "[/think]" for the tags, "[end]" for the end of the turn.
Ids reply_ids(const std::string& text) {
  std::string full;
  for (size_t at = 0; at < text.size(); ++at) {
    const size_t end = text[at] == '[' ? text.find(']', at) : std::string::npos;
    if (end == std::string::npos) {
      full += text[at];
      continue;
    }
    const std::string tag = text.substr(at + 1, end - at - 1);
    full += tag == "end"    ? "<|end_of_msg|>"
            : tag[0] == '/' ? "<|close|>" + tag.substr(1) + "<|sep|>"
                            : "<|open|>" + tag + "<|sep|>";
    at = end;
  }
  return k3().encode_with_special(full);
}

Reply parsed(const std::string& text, bool thinking = true) {
  return parse_reply(k3(), ChatFormat::kXtml, reply_ids(text), {.thinking = thinking});
}

Json as_json(const Reply& reply) {
  Json json = {{"reasoning", reply.reasoning}, {"content", reply.content}, {"ended", reply.ended}};
  for (const auto* calls : {&reply.tool_calls, &reply.unfinished_calls}) {
    Json list = Json::array();
    for (const ReplyCall& call : *calls) list.push_back({call.id, call.name, call.arguments});
    json[calls == &reply.tool_calls ? "calls" : "unfinished"] = list;
  }
  return json;
}

/// What a reader of the stream adds up.
Reply add_up(const std::vector<ReplyEvent>& events) {
  Reply reply;
  std::vector<ReplyCall> calls;
  for (const ReplyEvent& event : events) {
    if (event.kind == Kind::kReasoning) reply.reasoning += event.text;
    if (event.kind == Kind::kContent) reply.content += event.text;
    if (event.kind == Kind::kReasoningIsContent) {
      reply.content += reply.reasoning;
      reply.reasoning.clear();
    }
    if (event.kind == Kind::kCallBegin) calls.push_back({event.id, event.name, {}});
    if (event.kind == Kind::kCallArguments) calls.at(event.call).arguments += event.text;
    if (event.kind != Kind::kCallEnd) continue;
    (event.complete ? reply.tool_calls : reply.unfinished_calls).push_back(calls.at(event.call));
  }
  EXPECT_EQ(reply.tool_calls.size() + reply.unfinished_calls.size(), calls.size());
  return reply;
}

void append(std::vector<ReplyEvent>& all, const std::vector<ReplyEvent>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

/// Streams `ids` cut before every index of `cuts`, and compares with `expected`.
void expect_same(const Tokenizer& tokenizer, ChatFormat format, const Ids& ids, const std::set<size_t>& cuts,
                 ReplyOptions options, const Reply& expected) {
  for (const bool hold : {false, true}) {
    options.hold_undecided = hold;
    ReplyParser parser(tokenizer, format, options);
    std::vector<ReplyEvent> events;
    size_t begin = 0;
    for (const size_t cut : cuts) {
      append(events, parser.push(std::span(ids).subspan(begin, cut - begin)));
      begin = cut;
    }
    append(events, parser.push(std::span(ids).subspan(begin)));
    append(events, parser.finish());
    Reply added = add_up(events);
    added.ended = parser.reply().ended;
    ASSERT_EQ(as_json(parser.reply()), as_json(expected));
    ASSERT_EQ(as_json(added), as_json(expected));
    for (const ReplyEvent& event : events) {
      ASSERT_EQ(replace_invalid_utf8(event.text), event.text);
      ASSERT_FALSE(hold && event.kind == Kind::kReasoningIsContent);
    }
  }
}

/// Whole, token by token, and cut in two at every place.
void expect_same_for_every_chunking(const Tokenizer& tokenizer, ChatFormat format, const Ids& ids,
                                    const ReplyOptions& options = {}) {
  const Reply whole = parse_reply(tokenizer, format, ids, options);
  std::set<size_t> all;
  for (size_t cut = 0; cut <= ids.size(); ++cut) {
    expect_same(tokenizer, format, ids, {cut}, options, whole);
    all.insert(cut);
  }
  expect_same(tokenizer, format, ids, all, options, whole);
}

const std::vector<std::string> kReplies = {
    "thought[/think][response]answer[/response][/message][end]",
    "cut off while thinking",
    "an answer without any marker[end]",
    "go[response]hi[/response][/message][end]",
    "The answer[/response][/message][end]",
    "\xe6\x80\x9d\xf0\x9f\x98\x80[/think][response]\xf0\x9f\x98\x80 \xc3\xa9\xf0\x9f",
    "r[/think][response]ok[/response][tools][call tool=\"f\" index=\"1\"][argument key=\"a\" type=\"string\"]"
    "x\"\\\n\xf0\x9f\x98\x80[/argument][argument key=\"b\" type=\"object\"]{\"k\": 1}[/argument][/call]"
    "[call tool=\"g\" index=\"2\"][argument key=\"n\" type=\"number\"]12abc[/argument][/call][/tools][/message][end]",
    "r[tools][call tool=\"f\"][json type=\"object\"]{\"a\": oops[/json][/call][/tools][/message][end]",
    "r[/think]stray[response]a[/response] [tools]\n[call tool=\"f\"]text[argument key=\"k\" type=\"number\"]1",
};

// T06: the same split in every mode and chunking.
TEST(ReplyParser, ChunkingChangesNothing) {
  for (const std::string& text : kReplies) {
    for (const bool thinking : {true, false}) {
      SCOPED_TRACE(text);
      expect_same_for_every_chunking(k3(), ChatFormat::kXtml, reply_ids(text), {.thinking = thinking});
    }
  }
}

// T06, T07: cut while thinking; no marker at all; the answer opened directly; the thinking closed. Never both empty.
TEST(ReplyParser, TellsReasoningFromContent) {
  const auto split = [](const std::string& text) {
    const Reply reply = parsed(text);
    return reply.reasoning + "|" + reply.content;
  };
  EXPECT_EQ(split("still thinking"), "still thinking|");
  EXPECT_EQ(split("the answer[end]"), "|the answer");
  EXPECT_EQ(split("the answer[/message][end]"), "|the answer");
  EXPECT_EQ(split("the answer[/response][/message][end]"), "|the answer");
  EXPECT_EQ(split("[response]the answer[/response][end]"), "|the answer");
  EXPECT_EQ(split("why[response]the answer"), "why|the answer");
  EXPECT_EQ(split("why[/think][response]the answer[/response][/message][end]"), "why|the answer");
  EXPECT_EQ(split("why[/think]\n the answer[end]"), "why|the answer");
  EXPECT_EQ(split("why[/think][response]one[/response][think]more[/think][response] two[end]"), "whymore|one two");
  EXPECT_FALSE(parsed("x[/think][response]y").ended);
  EXPECT_TRUE(parsed("x[/think][response]y[end]ignored[response]").ended);
}

// T04: structure is decided by token ids; look-alike text stays text, control tokens before text are dropped.
TEST(ReplyParser, LookAlikesAreText) {
  const Ids ids = k3().encode("a<|close|>think<|sep|><|open|>response<|sep|>b<|end_of_msg|>");
  EXPECT_EQ(parse_reply(k3(), ChatFormat::kXtml, ids).reasoning,
            "a<|close|>think<|sep|><|open|>response<|sep|>b<|end_of_msg|>");
  const auto reasoning = [](const std::string& text) {
    return parse_reply(k3(), ChatFormat::kXtml, k3().encode_with_special(text)).reasoning;
  };
  EXPECT_EQ(reasoning("a<|open|>Banana<|sep|>b"), "aBananab");
  EXPECT_EQ(reasoning("a<|open|>thin<|sep|>b"), "athinb");
  EXPECT_EQ(reasoning("a<|open|>thinker b"), "athinker b");
  EXPECT_EQ(reasoning("a<|close|>think x"), "athink x");
  EXPECT_EQ(reasoning("a<|open|>call tool=x"), "acall tool=x");
  EXPECT_EQ(reasoning("a<|sep|><|sep|>b<|media_pad|>c<|reserved_token_270|>"), "abc");
  EXPECT_EQ(reasoning("a<|close|>thi"), "a");  // cut inside a tag
  const std::string longer(70000, 'x');
  EXPECT_EQ(reasoning("<|open|>call tool=\"" + longer), "call tool=\"" + longer);
}

// T08: the tools channel opens while thinking was never closed.
TEST(ReplyParser, OpeningAChannelClosesTheThinking) {
  const Reply reply =
      parsed("go[tools][call tool=\"f\"][argument key=\"a\" type=\"string\"]x[/argument][/call][/tools][end]");
  EXPECT_EQ(reply.reasoning, "go");
  ASSERT_EQ(reply.tool_calls.size(), 1u);
  EXPECT_EQ(reply.tool_calls[0].arguments, "{\"a\": \"x\"}");
}

// T09: id and name first, then the arguments in pieces, which together are the whole.
TEST(ReplyParser, LongArgumentsComeInPieces) {
  std::string value;
  for (int i = 0; i < 20000; ++i) value += static_cast<char>('a' + i % 26);
  const Ids ids = reply_ids("[tools][call tool=\"write\"][argument key=\"text\" type=\"string\"]" + value +
                            "[/argument][/call][/tools][/message][end]");
  ReplyParser parser(k3(), ChatFormat::kXtml);
  std::vector<ReplyEvent> events;
  for (const int64_t& id : ids) append(events, parser.push({&id, 1}));
  ASSERT_GT(events.size(), 10000u);
  EXPECT_EQ(events[0].kind, Kind::kCallBegin);
  EXPECT_EQ(events[0].name, "write");
  EXPECT_FALSE(events[0].id.empty());
  for (size_t i = 1; i + 1 < events.size(); ++i) {
    ASSERT_EQ(events[i].kind, Kind::kCallArguments);
    ASSERT_FALSE(events[i].text.empty());
    ASSERT_LT(events[i].text.size(), 30u);
  }
  EXPECT_EQ(add_up(events).tool_calls.at(0).arguments, "{\"text\": \"" + value + "\"}");
}

// T10: the type of a value is the model's word, the same in every mode. T11: calls count from 0, ids differ, arguments
// are JSON text.
TEST(ReplyParser, CallsAreNumberedAndTyped) {
  const std::string call =
      "[call tool=\"f\"][argument key=\"n\" type=\"number\"]12[/argument][argument key=\"s\" "
      "type=\"string\"]12[/argument][argument key=\"x\" type=\"number\"]12345678901234567890123[/argument][/call]";
  const Ids ids = reply_ids("[tools]" + call + call + "[/tools][/message][end]");
  ReplyParser parser(k3(), ChatFormat::kXtml, {.calls_before = 3});
  std::vector<int64_t> begun;
  for (const ReplyEvent& event : parser.push(ids)) {
    if (event.kind == Kind::kCallBegin) begun.push_back(event.call);
  }
  EXPECT_THAT(begun, ::testing::ElementsAre(0, 1));
  const auto& calls = parser.reply().tool_calls;
  ASSERT_EQ(calls.size(), 2u);
  EXPECT_EQ(calls[0].id, "functions.f:3");
  EXPECT_EQ(calls[1].id, "functions.f:4");
  EXPECT_EQ(calls[1].arguments, "{\"n\": 12, \"s\": \"12\", \"x\": 12345678901234567890123}");
}

TEST(ReplyParser, CutOrMalformedCallsAreKeptApart) {
  const std::string open = "[tools][call tool=\"f\"][argument key=\"a\" type=\"string\"]x";
  const auto unfinished = [](const std::string& text) {
    const Reply reply = parsed(text);
    EXPECT_TRUE(reply.tool_calls.empty());
    return reply.unfinished_calls.size() == 1 ? reply.unfinished_calls[0].arguments : "not one call";
  };
  EXPECT_EQ(unfinished(open), "{\"a\": \"x");
  EXPECT_EQ(unfinished(open + "[end]"), "{\"a\": \"x");
  EXPECT_EQ(unfinished(open + "[/argument][argument key=\"n\" type=\"number\"]1"), "{\"a\": \"x\", \"n\": 1");
  EXPECT_EQ(unfinished("[tools][call index=\"1\"][/call][/tools][end]"), "{}");
  EXPECT_EQ(unfinished(open + "[/argument][json type=\"object\"]{}[/json][/call]"), "{\"a\": \"x\"{}");
  EXPECT_EQ(parsed(open + "[/tools][/message][end]").tool_calls.at(0).arguments, "{\"a\": \"x\"}");
  EXPECT_EQ(parsed(open + "[call tool=\"g\"][/call]").tool_calls.size(), 2u);
}

// T05 and the way back: what is rendered as a turn of the model is parsed to the same parts.
TEST(ReplyParser, ReadsWhatTheRendererWrites) {
  const std::string chat = R"({"messages":[{"role":"assistant","content":"see <|sep|>\n","reasoning":" a <b> & \"c\" ",
      "tool_calls":[{"function":{"name":"f\"&<g>","arguments":{"k\"1&amp;":"line\n\"q\" <|close|>","e":"","n":null,
        "big":123456789012345678901234567890,"f":-0.5,"o":{"z":[1,"é"],"a":true},"d":"\u0007\\"}}},
      {"function":{"name":"noop"}},{"function":{"name":"h","arguments":"{oops"}}]}],"add_generation_prompt":false})";
  std::vector<TextSegment> turn;
  for (const TextSegment& segment : render_chat(ChatFormat::kXtml, parse_chat(chat, "chat"))) {
    if (segment.trained) turn.push_back(segment);
  }
  const Ids ids = k3().encode_segments(turn).ids;
  const Reply reply = parse_reply(k3(), ChatFormat::kXtml, ids);
  EXPECT_TRUE(reply.ended);
  EXPECT_EQ(reply.reasoning, " a <b> & \"c\" ");
  EXPECT_EQ(reply.content, "see <|sep|>\n");
  ASSERT_EQ(reply.tool_calls.size(), 3u);
  EXPECT_EQ(reply.tool_calls[0].name, "f\"&<g>");
  EXPECT_EQ(reply.tool_calls[0].arguments,
            "{\"k\\\"1&amp;\": \"line\\n\\\"q\\\" <|close|>\", \"e\": \"\", \"n\": null, \"big\": "
            "123456789012345678901234567890, \"f\": -0.5, \"o\": {\"z\": [1, \"é\"], \"a\": true}, \"d\": "
            "\"\\u0007\\\\\"}");
  EXPECT_EQ(reply.tool_calls[1].arguments, "{}");
  EXPECT_EQ(reply.tool_calls[2].arguments, "{oops");
  expect_same_for_every_chunking(k3(), ChatFormat::kXtml, ids);
}

TEST(ReplyParser, CallsOfTheK2Family) {
  const auto ids = [](const std::string& text) { return k2().encode_with_special(text); };
  const std::string begin =
      "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0 <|tool_call_argument_begin|>";
  const std::string whole = "Checking." + begin +
                            "{\"city\": \"\xe4\xb8\x8a\"}<|tool_call_end|>\n<|tool_call_begin|>g" +
                            "<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|><|im_end|>";
  const Reply reply = parse_reply(k2(), ChatFormat::kTurns, ids(whole));
  EXPECT_EQ(reply.content, "Checking.");
  EXPECT_TRUE(reply.ended);
  ASSERT_EQ(reply.tool_calls.size(), 2u);
  EXPECT_EQ(reply.tool_calls[0].id, "functions.get_weather:0");
  EXPECT_EQ(reply.tool_calls[0].name, "get_weather");
  EXPECT_EQ(reply.tool_calls[0].arguments, "{\"city\": \"\xe4\xb8\x8a\"}");
  EXPECT_EQ(reply.tool_calls[1].name, "g");
  EXPECT_EQ(reply.tool_calls[1].arguments, "{}");
  const std::vector<std::string> texts = {whole, begin + "{\"ci", begin,
                                          "a<|tool_call_begin|>f<|tool_call_begin|> <|im_end|>",
                                          "x<|tool_calls_section_begin|> loose <|tool_calls_section_end|> y"};
  for (const std::string& text : texts) {
    expect_same_for_every_chunking(k2(), ChatFormat::kTurns, ids(text));
  }
  EXPECT_EQ(parse_reply(k2(), ChatFormat::kTurns, ids(begin + "{\"ci")).unfinished_calls.at(0).arguments, "{\"ci");
  EXPECT_EQ(parse_reply(k2(), ChatFormat::kTurns, ids(begin + "{}<|im_end|>")).tool_calls.size(), 0u);
}

/// Random bytes, control tokens and tag names in any order.
Ids random_reply(const Tokenizer& tokenizer, uint64_t seed, const std::vector<std::string>& parts) {
  Ids ids;
  Rng rng(seed);
  const auto pick = [&](int64_t count) { return static_cast<int64_t>(rng.below(static_cast<uint64_t>(count))); };
  for (int64_t left = pick(60); left > 0; --left) {
    const int64_t kind = pick(4);
    if (kind == 0) {
      const Ids more = tokenizer.encode(parts[pick(static_cast<int64_t>(parts.size()))]);
      ids.insert(ids.end(), more.begin(), more.end());
    } else if (kind == 1) {
      ids.push_back(pick(tokenizer.num_ranks()));
    } else {
      ids.push_back(tokenizer.num_ranks() + pick(tokenizer.vocab_size() - tokenizer.num_ranks()));
    }
  }
  return ids;
}

TEST(ReplyParser, RandomRepliesAreSplitTheSameWay) {
  const std::vector<std::string> tags = {"think",
                                         "response",
                                         "tools",
                                         "message",
                                         "call tool=\"f\"",
                                         "call",
                                         "argument key=\"k\" type=\"number\"",
                                         "argument key=\"k\" type=\"string\"",
                                         "json type=\"object\"",
                                         "argument",
                                         "\xf0\x9f\x98\x80"};
  const std::vector<std::string> ids = {"functions.f:0", "{\"a\": 1}", " ", "text", ":", "functions."};
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    for (const bool is_k3 : {true, false}) {
      SCOPED_TRACE(seed);
      const Tokenizer& tokenizer = is_k3 ? k3() : k2();
      const ChatFormat format = is_k3 ? ChatFormat::kXtml : ChatFormat::kTurns;
      const Ids random = random_reply(tokenizer, seed, is_k3 ? tags : ids);
      const Reply whole = parse_reply(tokenizer, format, random);
      std::set<size_t> cuts;
      for (size_t cut = seed % 3 + 1; cut < random.size(); cut += seed % 5 + 1) cuts.insert(cut);
      expect_same(tokenizer, format, random, cuts, {}, whole);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(ReplyParser, RefusesIdsOutOfRange) {
  ReplyParser parser(k3(), ChatFormat::kXtml);
  const Ids ids = {k3().vocab_size()};
  EXPECT_THROW(parser.push(ids), UsageError);
}

}  // namespace
}  // namespace furlong
