#include "furlong/tokenizer/tokenizer.h"

#include <utility>

namespace furlong {

namespace {

/// Length in bytes of the UTF-8 character that starts with `lead`; 1 for bytes that start none.
size_t character_length(unsigned char lead) {
  if (lead >= 0xf0 && lead < 0xf8) return 4;
  if (lead >= 0xe0) return lead < 0xf0 ? 3 : 1;
  return lead >= 0xc0 ? 2 : 1;
}

/// Bytes at the end of `text` that begin a character which is not complete yet.
size_t incomplete_tail(const std::string& text) {
  for (size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xc0) == 0x80) continue;
    return character_length(byte) > back ? back : 0;
  }
  return 0;
}

}  // namespace

std::string StreamDecoder::push(int64_t id) {
  pending_ += tokenizer_.token_bytes(id);
  const size_t tail = incomplete_tail(pending_);
  std::string complete = pending_.substr(0, pending_.size() - tail);
  pending_.erase(0, pending_.size() - tail);
  return complete;
}

std::string StreamDecoder::flush() {
  return std::exchange(pending_, {});
}

}  // namespace furlong
