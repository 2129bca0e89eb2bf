#include "furlong/tokenizer/exact_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "furlong/base/error.h"

namespace furlong {
namespace {

using ::testing::HasSubstr;

std::string again(const std::string& text, JsonStyle style = JsonStyle::kSpaced) {
  return exact_json_text(parse_exact_json(text, "test"), style);
}

std::string message_of(const std::string& text) {
  try {
    again(text);
  } catch (const FormatError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ExactJson, LaysTextOutInThreeStyles) {
  const std::string text = R"({"b":[1,{"z":null,"a":true}],"a":"é\n\"\\\u0001"})";
  EXPECT_EQ(again(text), R"({"b": [1, {"z": null, "a": true}], "a": "é\n\"\\\u0001"})");
  EXPECT_EQ(again(text, JsonStyle::kCompact), text);
  EXPECT_EQ(again(text, JsonStyle::kCompactSorted), R"({"a":"é\n\"\\\u0001","b":[1,{"a":true,"z":null}]})");
  EXPECT_EQ(again("[ ]"), "[]");
  EXPECT_EQ(again("{ }"), "{}");
}

TEST(ExactJson, NumbersAreWrittenAsPythonWritesThem) {
  for (const std::string same : {"0",
                                 "-1",
                                 "18446744073709551615",
                                 "-9223372036854775808",
                                 "123456789012345678901234567890",
                                 "1.5",
                                 "-0.0",
                                 "0.1",
                                 "100.0",
                                 "0.0001",
                                 "1e-05",
                                 "1.25e-07",
                                 "1000000000000000.0",
                                 "1e+16",
                                 "1.5e+16",
                                 "1e+100",
                                 "5e-324",
                                 "1.7976931348623157e+308",
                                 "123456789.125",
                                 "0.30000000000000004"}) {
    EXPECT_EQ(again(same), same);
  }
  EXPECT_EQ(again("1E2"), "100.0");
  EXPECT_EQ(again("1e15"), "1000000000000000.0");
  EXPECT_EQ(again("0.00001"), "1e-05");
  EXPECT_EQ(again("12300e-2"), "123.0");
}

TEST(ExactJson, OfEqualKeysTheLastValueCountsAtThePlaceOfTheFirst) {
  EXPECT_EQ(again(R"({"a":1,"b":2,"a":{"c":3}})"), R"({"a": {"c": 3}, "b": 2})");
}

TEST(ExactJson, RefusesHostileText) {
  EXPECT_THAT(message_of("{\"a\": }"), HasSubstr("test: not valid JSON"));
  EXPECT_THAT(message_of(std::string(100000, '[')), HasSubstr("test: nested deeper than 200 levels"));
  EXPECT_THAT(message_of("\"\xff\""), HasSubstr("not valid JSON"));
  EXPECT_THAT(message_of("1e999"), HasSubstr("not valid JSON"));
  EXPECT_THAT(message_of(""), HasSubstr("not valid JSON"));
  EXPECT_EQ(message_of(std::string(200, '[') + std::string(200, ']')), "no error");
}

TEST(ExactJson, ManyKeysTakeNoQuadraticTime) {
  std::string text = "{";
  for (int i = 0; i < 200000; ++i) text += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":0";
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(again(text + "}", JsonStyle::kCompact), text + "}");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));  // all pairs: minutes
}

}  // namespace
}  // namespace furlong
