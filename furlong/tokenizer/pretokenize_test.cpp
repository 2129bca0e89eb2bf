#include "furlong/tokenizer/pretokenize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "furlong/tokenizer/utf8.h"

namespace furlong {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> pieces;
  pretokenize(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

std::string repeat(std::string_view text, size_t count) {
  std::string result;
  for (size_t i = 0; i < count; ++i) result += text;
  return result;
}

TEST(Pretokenize, SplitsWordsNumbersAndSpaces) {
  EXPECT_THAT(split(""), ElementsAre());
  EXPECT_THAT(split("Hello  world!\n\n x"), ElementsAre("Hello", " ", " world", "!\n\n", " x"));
  EXPECT_THAT(split("12345"), ElementsAre("123", "45"));
  EXPECT_THAT(split("don't DON'T"), ElementsAre("don't", " DON'T"));
  EXPECT_THAT(split("\r\n\r\n  x"), ElementsAre("\r\n\r\n", " ", " x"));
  EXPECT_THAT(split("HTTPServer"), ElementsAre("HTTPServer"));
  EXPECT_THAT(split("mixedCASEword"), ElementsAre("mixed", "CASEword"));
}

TEST(Pretokenize, KeepsHanApartFromOtherLetters) {
  EXPECT_THAT(split("a道b"), ElementsAre("a", "道", "b"));
  EXPECT_THAT(split("中文English"), ElementsAre("中文", "English"));
  EXPECT_THAT(split("かな漢字"), ElementsAre("かな", "漢字"));
  EXPECT_THAT(split("々〆〇"), ElementsAre("々", "〆", "〇"));  // U+3006 has script Zyyy and is a letter
}

TEST(Pretokenize, UnicodeSpacesAreSpaces) {
  EXPECT_THAT(split("a\u3000\u3000b"), ElementsAre("a", "\u3000", "\u3000b"));
  EXPECT_THAT(split("\u180e!"), ElementsAre("\u180e!"));  // no white space since Unicode 6.3
}

TEST(Pretokenize, InvalidBytesStandAlone) {
  EXPECT_THAT(split("ab\xff\xfe cd"), ElementsAre("ab", "\xff", "\xfe", " cd"));
  EXPECT_THAT(split("\xed\xa0\x80"), ElementsAre("\xed", "\xa0", "\x80"));  // a surrogate
  EXPECT_THAT(split("a\xe9\x81"), ElementsAre("a", "\xe9", "\x81"));
}

TEST(Pretokenize, CutsLongRuns) {
  EXPECT_THAT(split(std::string(25'000, 'x')), ElementsAre(std::string(25'000, 'x')));
  EXPECT_THAT(split(std::string(25'001, 'x')), ElementsAre(std::string(25'000, 'x'), "x"));
  const std::string han = repeat("道", 25'003);
  EXPECT_THAT(split(han), ElementsAre(repeat("道", 25'000), repeat("道", 3)));
  EXPECT_THAT(split(std::string(26'000, ' ') + "word"),
              ElementsAre(std::string(25'000, ' '), std::string(999, ' '), " word"));
}

TEST(Pretokenize, CutsAfterFourHundredThousandCharacters) {
  const auto pieces = split(repeat("abcdefg ", 50'001));
  EXPECT_EQ(pieces[49'999], " abcdefg");
  EXPECT_EQ(pieces[50'000], " ");  // the cut parts a space from its word
  EXPECT_EQ(pieces[50'001], "abcdefg");
}

TEST(Utf8, ReplacesMaximalIllFormedParts) {
  const std::string mark = "\xef\xbf\xbd";
  EXPECT_EQ(replace_invalid_utf8("ok"), "ok");
  EXPECT_EQ(replace_invalid_utf8("\xf0\x9f\x98"), mark);
  EXPECT_EQ(replace_invalid_utf8("\xc0\xaf"), mark + mark);
  EXPECT_EQ(replace_invalid_utf8("\xed\xa0\x80"), mark + mark + mark);
  EXPECT_EQ(replace_invalid_utf8("\xe2(\xa1"), mark + "(" + mark);
}

}  // namespace
}  // namespace furlong
