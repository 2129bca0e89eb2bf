// Kind tokenizer: ids of texts, texts of ids, exactly. T03: Han beside Latin contractions, punctuation and digits are
// among the texts.

#include <string>
#include <string_view>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/sha256.h"
#include "furlong/tokenizer/pretokenize.h"
#include "furlong/tokenizer/tokenizer.h"
#include "furlong/tokenizer/utf8.h"
#include "tests/golden/tally.h"
#include "tests/support/golden.h"

namespace furlong::golden {
namespace {

using Ids = std::vector<int64_t>;

void check_encode(Case& test, const Tokenizer& tokenizer, const Tokenizer& other_table) {
  Tally ids_tally("ids"), pieces_tally("pre-tokens"), special_tally("ids with special tokens"),
      other_tally("ids with the other token table"), back_tally("text of ids");
  const Json file = read_json(test.folder() / "encode.json");
  for (const Json& entry : file.at("cases")) {
    const auto text = entry.at("text").get<std::string>();
    const Ids ids = entry.at("ids").get<Ids>();
    ids_tally.add(tokenizer.encode(text) == ids, text);
    back_tally.add(tokenizer.decode(ids) == text, text);
    special_tally.add(tokenizer.encode_with_special(text) == entry.value("ids_specials_allowed", ids), text);
    if (entry.contains("ids_specials_allowed_48b_table")) {
      other_tally.add(other_table.encode_with_special(text) == entry["ids_specials_allowed_48b_table"].get<Ids>(),
                      text);
    }
    if (!entry.contains("pieces")) continue;
    std::vector<std::string> pieces;
    pretokenize(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
    pieces_tally.add(pieces == entry["pieces"].get<std::vector<std::string>>(), text);
  }
  for (const Tally* tally : {&ids_tally, &pieces_tally, &special_tally, &other_tally, &back_tally}) tally->report(test);
}

/// "'the' x 9000 + ' '": quoted texts, each with an optional count, joined.
std::string text_of_recipe(const std::string& recipe) {
  std::string text;
  for (size_t at = recipe.find('\''); at != std::string::npos; at = recipe.find('\'', at)) {
    const size_t end = recipe.find('\'', at + 1);
    if (end == std::string::npos) throw FormatError("recipe: " + recipe + ": the quote does not end");
    const std::string part = recipe.substr(at + 1, end - at - 1);
    at = end + 1;
    int64_t count = 1;
    if (recipe.compare(at, 3, " x ") == 0) count = std::stoll(recipe.substr(at + 3));
    for (; count > 0; --count) text += part;
  }
  return text;
}

void check_long(Case& test, const Tokenizer& tokenizer) {
  Tally tally("ids of long texts");
  const Json file = read_json(test.folder() / "encode_long.json");
  for (const Json& entry : file.at("cases")) {
    const Ids ids = tokenizer.encode(text_of_recipe(entry.at("recipe").get<std::string>()));
    const std::vector<int32_t> narrow(ids.begin(), ids.end());
    const std::string_view bytes(reinterpret_cast<const char*>(narrow.data()), narrow.size() * sizeof(int32_t));
    tally.add(sha256_hex(bytes) == entry.at("sha256_of_int32_le_ids").get<std::string>(),
              entry.at("what").get<std::string>());
  }
  tally.report(test);
}

void check_decode(Case& test, const Tokenizer& tokenizer) {
  Tally bytes_tally("bytes of ids"), text_tally("bytes of ids as valid text");
  const Json file = read_json(test.folder() / "decode.json");
  for (const Json& entry : file.at("cases")) {
    const std::string bytes = tokenizer.decode(entry.at("ids").get<Ids>());
    std::string hex;
    for (const char byte : bytes) {
      for (const int shift : {4, 0}) hex += "0123456789abcdef"[static_cast<unsigned char>(byte) >> shift & 15];
    }
    bytes_tally.add(hex == entry.at("bytes_hex").get<std::string>(), hex);
    text_tally.add(replace_invalid_utf8(bytes) == entry.at("text_replace").get<std::string>(), hex);
  }
  bytes_tally.report(test);
  text_tally.report(test);
}

void run_tokenizer(Case& test) {
  const Tokenizer tokenizer = Tokenizer::load(test.folder());
  const Tokenizer other_table = Tokenizer::from_text(read_file(test.folder() / "tiktoken.model"), "48b",
                                                     read_file(test.folder() / "tokenizer_config.48b.json"));
  check_encode(test, tokenizer, other_table);
  check_long(test, tokenizer);
  check_decode(test, tokenizer);
}

FURLONG_GOLDEN("tokenizer", run_tokenizer);

}  // namespace
}  // namespace furlong::golden
