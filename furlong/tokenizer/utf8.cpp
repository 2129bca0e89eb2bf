#include "furlong/tokenizer/utf8.h"

namespace furlong {

namespace {

struct Scan {
  size_t good = 0;    // bytes that a well-formed character may begin with
  size_t needed = 1;  // its length
};

/// Follows the table of well-formed sequences (Unicode 3-7): only the second byte's range depends on the first.
Scan scan(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[at + i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {1, 1};
  if (lead < 0xc2 || lead > 0xf4) return {};
  const size_t needed = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  const unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  size_t good = 1;
  while (good < needed && at + good < text.size()) {
    const unsigned char next = byte(good);
    if (next < (good == 1 ? low : 0x80) || next > (good == 1 ? high : 0xbf)) break;
    ++good;
  }
  return {good, needed};
}

/// Length of the character that starts with `lead`; 1 for bytes that start none.
size_t character_length(unsigned char lead) {
  if (lead >= 0xf0 && lead < 0xf8) return 4;
  if (lead >= 0xe0) return lead < 0xf0 ? 3 : 1;
  return lead >= 0xc0 ? 2 : 1;
}

}  // namespace

size_t utf8_length(std::string_view text, size_t at) {
  const auto [good, needed] = scan(text, at);
  return good == needed ? needed : 0;
}

char32_t utf8_value(std::string_view text, size_t at, size_t length) {
  const auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[at + i])); };
  if (length == 1) return byte(0);
  char32_t value = byte(0) & (0x7f >> length);
  for (size_t i = 1; i < length; ++i) value = value << 6 | (byte(i) & 0x3f);
  return value;
}

size_t incomplete_utf8_tail(std::string_view text) {
  for (size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xc0) == 0x80) continue;
    return character_length(byte) > back ? back : 0;
  }
  return 0;
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const auto [good, needed] = scan(text, at);
    if (good == needed) {
      result.append(text, at, needed);
      at += needed;
    } else {
      result += "\xef\xbf\xbd";
      at += good > 0 ? good : 1;
    }
  }
  return result;
}

}  // namespace furlong
