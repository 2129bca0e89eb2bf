// Tokenizer files: ranks, a zero byte, tokenizer_config.json. With accepted ranks every text comes back as it was.

#include "furlong/tokenizer/tokenizer.h"

#include "tests/fuzz/fuzz.h"

namespace {

/// A rank for each byte, so that the text's path is reached whatever the input is.
const furlong::Tokenizer& bytes_only() {
  static const furlong::Tokenizer tokenizer = [] {
    static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string ranks;
    for (int byte = 0; byte < 256; ++byte) {
      ranks += {kDigits[byte >> 2], kDigits[(byte & 3) << 4], '=', '='};
      ranks += " " + std::to_string(byte) + "\n";
    }
    return furlong::Tokenizer::from_text(ranks, "fuzz");
  }();
  return tokenizer;
}

void comes_back(const furlong::Tokenizer& tokenizer, std::string_view text) {
  furlong::fuzz::accepts([&] { furlong::fuzz::require(tokenizer.decode(tokenizer.encode(text)) == text); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const auto parts = furlong::fuzz::split(input);
  furlong::fuzz::accepts([&] {
    const auto tokenizer = furlong::Tokenizer::from_text(parts.first, "fuzz", parts.second);
    comes_back(tokenizer, parts.second);
  });
  comes_back(bytes_only(), input);
  return 0;
}
