#include "furlong/tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <tuple>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/rng.h"
#include "furlong/tokenizer/base64.h"
#include "furlong/tokenizer/special_tokens.h"
#include "furlong/tokenizer/trainer.h"

namespace furlong {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> byte_tokens() {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  return tokens;
}

/// A tokenizer of the 256 bytes and `more`.
Tokenizer with_tokens(const std::vector<std::string>& more, int64_t reserved = 16) {
  std::vector<std::string> tokens = byte_tokens();
  tokens.insert(tokens.end(), more.begin(), more.end());
  const auto special = SpecialTokens::standard(static_cast<int64_t>(tokens.size()), reserved);
  return Tokenizer::from_text(rank_file_text(tokens), "test", special.to_json());
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

TEST(Tokenizer, MergesTheLowestRankFirst) {
  const auto tokenizer = with_tokens({"bc", "ab", "abc"});
  EXPECT_THAT(tokenizer.encode("abcd"), ElementsAre(258, 'd'));  // a + bc, then abc
  EXPECT_THAT(tokenizer.encode("abx"), ElementsAre(257, 'x'));
  EXPECT_THAT(tokenizer.encode("xbc"), ElementsAre('x', 256));
}

TEST(Tokenizer, TakesAPreTokenOfTheTableWhole) {
  // Merging "abcd" by rank would end in "ab" + "cd", for no pair of tokens makes "abcd".
  const auto tokenizer = with_tokens({"ab", "bc", "abcd"});
  EXPECT_THAT(tokenizer.encode("abcd"), ElementsAre(258));
}

TEST(Tokenizer, MergesTheLeftmostOfEqualPairs) {
  const auto tokenizer = with_tokens({"aa"});
  EXPECT_THAT(tokenizer.encode("aaa"), ElementsAre(256, 'a'));
  EXPECT_THAT(tokenizer.encode("aaaaa"), ElementsAre(256, 256, 'a'));
}

/// The definition: merge the leftmost pair of lowest rank until no pair is a token.
std::vector<int64_t> merge_slowly(const std::vector<std::string>& tokens, const std::string& text) {
  const auto rank_of = [&](const std::string& bytes) {
    return std::find(tokens.begin(), tokens.end(), bytes) - tokens.begin();
  };
  std::vector<std::string> parts;
  for (const char c : text) parts.emplace_back(1, c);
  while (true) {
    auto best = static_cast<int64_t>(tokens.size());
    size_t where = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const int64_t rank = rank_of(parts[i] + parts[i + 1]);
      if (rank < best) std::tie(best, where) = std::pair(rank, i);
    }
    if (best == static_cast<int64_t>(tokens.size())) break;
    parts[where] += parts[where + 1];
    parts.erase(parts.begin() + static_cast<int64_t>(where) + 1);
  }
  std::vector<int64_t> ids;
  for (const std::string& part : parts) ids.push_back(rank_of(part));
  return ids;
}

TEST(Tokenizer, ShortAndLongPiecesMergeByTheDefinition) {
  const std::vector<std::string> more = {"ab", "ba", "abab", "aab", "bb", "caab", "abababab", "ccc", "cccab", "bcc"};
  const auto tokenizer = with_tokens(more);
  std::vector<std::string> tokens = byte_tokens();
  tokens.insert(tokens.end(), more.begin(), more.end());
  Rng rng(3);
  for (size_t length = 1; length <= 200; ++length) {
    std::string text;
    for (size_t i = 0; i < length; ++i) text += static_cast<char>('a' + rng.below(3));
    if (std::find(more.begin(), more.end(), text) != more.end()) continue;
    EXPECT_EQ(tokenizer.encode(text), merge_slowly(tokens, text)) << text;
  }
}

TEST(Tokenizer, AnyBytesComeBack) {
  const auto tokenizer = with_tokens({"th", "the", " the", "\xe9\x81\x93"});
  std::string all;
  for (int round = 0; round < 3; ++round) {
    for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(round == 1 ? 255 - byte : byte * 7);
  }
  for (const std::string& text : {all, std::string(), std::string("\0", 1), std::string("\xe9\x81"),
                                  std::string("a\xff the \xc3"), std::string("\xf0\x9f\x98\x80\xf0\x9f")}) {
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
}

TEST(Tokenizer, LongRunsTakeNoQuadraticTime) {
  const auto tokenizer = with_tokens({"aa", "aaaa", "aaaaaaaa"});
  const std::string text(2'000'000, 'a');
  EXPECT_EQ(tokenizer.encode(text).size(), text.size() / 8);
}

TEST(Tokenizer, NeverMatchesSpecialTokensInOrdinaryText) {
  const auto tokenizer = with_tokens({});
  EXPECT_EQ(tokenizer.encode("<|sep|>").size(), 7u);
  EXPECT_THAT(tokenizer.encode_with_special("a<|sep|>[EOS]["),
              ElementsAre('a', *tokenizer.special_id("<|sep|>"), tokenizer.end_of_document(), '['));
  EXPECT_EQ(tokenizer.decode({'a', *tokenizer.special_id("<|sep|>")}), "a<|sep|>");
}

// T01: a reserved slot without a name is one token under its absolute id where specials are allowed, text elsewhere.
// T02: its id decodes to the synthetic name, or to nothing when specials are skipped.
TEST(Tokenizer, NamesUnnamedReservedTokensByTheirId) {
  const auto tokenizer = with_tokens({}, 16);
  EXPECT_EQ(tokenizer.vocab_size(), 256 + 16);
  EXPECT_EQ(tokenizer.token_bytes(256), "[BOS]");
  EXPECT_EQ(tokenizer.end_of_document(), 257);
  EXPECT_EQ(tokenizer.token_bytes(263), "<|reserved_token_263|>");
  EXPECT_EQ(tokenizer.token_bytes(270), "[UNK]");
  EXPECT_EQ(tokenizer.token_bytes(271), "[PAD]");
  EXPECT_THAT(tokenizer.encode_with_special("<|reserved_token_263|>"), ElementsAre(263));
  EXPECT_EQ(tokenizer.encode("<|reserved_token_263|>").size(), 22u);
  EXPECT_EQ(tokenizer.decode({'a', 263, 'b'}), "a<|reserved_token_263|>b");
  EXPECT_EQ(tokenizer.decode_ordinary({'a', 263, 'b'}), "ab");
  EXPECT_THROW(tokenizer.decode_ordinary({272}), UsageError);
  EXPECT_THAT(message_of([&] { tokenizer.token_bytes(272); }), HasSubstr("got 272, need 0 to 271"));
  EXPECT_THROW(tokenizer.token_bytes(-1), UsageError);
}

// T02: the published block holds 256 ids, whatever the last one is that the table names.
TEST(Tokenizer, ATableWithGapsIsAPublishedOne) {
  const std::string gaps = R"({"added_tokens_decoder":{"300":{"content":"[BOS]"},"303":{"content":"<|open|>"}}})";
  const auto published = SpecialTokens::from_json(gaps, 300, "test");
  EXPECT_EQ(published.count(), 256);
  EXPECT_EQ(published.name(301), "<|reserved_token_301|>");
  EXPECT_EQ(published.name(555), "<|reserved_token_555|>");
  const std::string whole = R"({"added_tokens_decoder":{"300":{"content":"[BOS]"},"301":{"content":"<|open|>"}}})";
  EXPECT_EQ(SpecialTokens::from_json(whole, 300, "test").count(), 2);
}

TEST(Tokenizer, OfNamesThatBeginAlikeTheLongestMatches) {
  const SpecialTokens special(300, {"<a>", "<a>b", "", "x"});
  EXPECT_EQ(special.match("-<a>bc", 1), 301);
  EXPECT_EQ(special.match("-<a>c", 1), 300);
  EXPECT_EQ(special.match("<a", 0), std::nullopt);
  EXPECT_EQ(special.match("x", 0), 303);
  EXPECT_EQ(special.match("<|reserved_token_302|>", 0), 302);
}

TEST(Tokenizer, SegmentsAreEncodedOneByOne) {
  const auto tokenizer = with_tokens({"ab"});
  const int64_t sep = *tokenizer.special_id("<|sep|>");
  const EncodedSegments encoded = tokenizer.encode_segments({{"a"}, {"b"}, {"<|sep|>", true}, {"ab", false, true}});
  EXPECT_THAT(encoded.ids, ElementsAre('a', 'b', sep, 256));
  EXPECT_THAT(encoded.trained, ElementsAre(false, false, false, true));
  // Nobody's text makes a control token.
  EXPECT_EQ(tokenizer.encode_segments({{"<|sep|>"}}).ids, tokenizer.encode("<|sep|>"));
}

TEST(Tokenizer, RefusesDamagedRankFiles) {
  const std::string good = rank_file_text(byte_tokens());
  const auto refusal = [](const std::string& text) { return message_of([&] { Tokenizer::from_text(text, "ranks"); }); };
  EXPECT_THAT(refusal(""), HasSubstr("has no token for byte 0"));
  EXPECT_THAT(refusal("!!!! 0\n"), HasSubstr("ranks:1: the token is not base64"));
  EXPECT_THAT(refusal("<html>"), HasSubstr("ranks:1: need 'base64 rank'"));
  EXPECT_THAT(refusal(good + "YWI= 257\n"), HasSubstr("ranks:257: got rank 257, need 256"));
  EXPECT_THAT(refusal(good + "YWI= x\n"), HasSubstr("ranks:257: the rank is no number"));
  EXPECT_THAT(refusal(good + "QQ== 256\n"), HasSubstr("ranks:257: the token was there before"));
  EXPECT_THAT(refusal(good.substr(0, good.size() / 2)), HasSubstr("ranks:"));
  EXPECT_EQ(refusal(good), "no error");
}

TEST(Tokenizer, RefusesDamagedTokenTables) {
  const std::string good = rank_file_text(byte_tokens());
  const auto refusal = [&](const std::string& config) {
    return message_of([&] { Tokenizer::from_text(good, "dir/ranks", config); });
  };
  EXPECT_THAT(refusal("{}"), HasSubstr("dir/tokenizer_config.json: has no table 'added_tokens_decoder'"));
  EXPECT_THAT(refusal("{"), HasSubstr("dir/tokenizer_config.json"));
  EXPECT_THAT(refusal(R"({"added_tokens_decoder": {"12": {"content": "x"}}})"), HasSubstr("id 12 is outside"));
  EXPECT_THAT(refusal(R"({"added_tokens_decoder": {"99999999999": {"content": "x"}}})"), HasSubstr("is outside"));
  EXPECT_THAT(refusal(R"({"added_tokens_decoder": {"x": {"content": "x"}}})"), HasSubstr("'x' is not a token id"));
  EXPECT_THAT(refusal(R"({"added_tokens_decoder": {"256": {"content": 7}}})"), HasSubstr("id 256 has no text"));
  EXPECT_THAT(refusal(R"({"added_tokens_decoder": {"256": {"content": "x"}, "257": {"content": "x"}}})"),
              HasSubstr("got 'x' twice"));
}

TEST(Tokenizer, LoadsAFolderOrAFile) {
  const auto folder = std::filesystem::temp_directory_path() / "furlong_tokenizer_test";
  make_folders(folder);
  write_file_atomic(folder / "tiktoken.model", rank_file_text(byte_tokens()));
  std::filesystem::remove(folder / "tokenizer_config.json");
  EXPECT_EQ(Tokenizer::load(folder).vocab_size(), 512);  // no table: 256 reserved ids
  write_file_atomic(folder / "tokenizer_config.json", SpecialTokens::standard(256, 8).to_json());
  EXPECT_EQ(Tokenizer::load(folder).vocab_size(), 264);
  EXPECT_EQ(Tokenizer::load(folder / "tiktoken.model").vocab_size(), 264);
  EXPECT_EQ(Tokenizer::load(folder).sha256().size(), 64u);
  EXPECT_THROW(Tokenizer::load(folder / "missing"), IoError);
  std::filesystem::remove_all(folder);
}

TEST(Base64, RoundTripsAndRefuses) {
  for (const std::string& bytes :
       {std::string(), std::string("a"), std::string("ab"), std::string("abc"), std::string("\xff\x00\x7f\x80", 4)}) {
    EXPECT_EQ(base64_decode(base64_encode(bytes)), bytes);
  }
  EXPECT_EQ(base64_encode("abcd"), "YWJjZA==");
  for (const char* bad : {"YQ", "Y===", "YQ=a", "Y Q=", "\xff\xff\xff\xff"}) EXPECT_FALSE(base64_decode(bad)) << bad;
}

// T74: characters of 2, 3 and 4 bytes over several tokens; the incomplete tail comes once, at the end.
TEST(StreamDecoder, NeverBreaksACharacter) {
  const auto tokenizer = with_tokens({});
  const std::string text = "a\xc3\xa9\xe9\x81\x93\xf0\x9f\x98\x80!";
  StreamDecoder stream(tokenizer);
  std::string joined;
  for (const int64_t id : tokenizer.encode(text)) {
    const std::string part = stream.push(id);
    for (size_t at = 0; at < part.size();) {
      const auto lead = static_cast<unsigned char>(part[at]);
      ASSERT_NE(lead & 0xc0, 0x80) << "a part starts inside a character";
      at += lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
      ASSERT_LE(at, part.size()) << "a part ends inside a character";
    }
    joined += part;
  }
  EXPECT_EQ(joined + stream.flush(), text);
}

TEST(StreamDecoder, LosesNothingOfInvalidText) {
  const auto tokenizer = with_tokens({});
  for (const std::string& text :
       {std::string("\xff\xfe z"), std::string("a\xf0\x9f"), std::string("\x80\x80\x80\x80\x80"),
        std::string("\xe9z\xc3"), std::string("\xf8\x88\x80\x80\x80")}) {
    StreamDecoder stream(tokenizer);
    std::string joined;
    for (const int64_t id : tokenizer.encode(text)) joined += stream.push(id);
    EXPECT_EQ(joined + stream.flush(), text);
    EXPECT_EQ(stream.flush(), "");
  }
}

}  // namespace
}  // namespace furlong
