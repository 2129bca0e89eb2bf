#include "furlong/tokenizer/tokenizer.h"

#include <utility>

#include "furlong/tokenizer/utf8.h"

namespace furlong {

std::string StreamDecoder::push(int64_t id) {
  pending_ += tokenizer_.token_bytes(id);
  const size_t tail = incomplete_utf8_tail(pending_);
  std::string complete = pending_.substr(0, pending_.size() - tail);
  pending_.erase(0, pending_.size() - tail);
  return complete;
}

std::string StreamDecoder::flush() {
  return std::exchange(pending_, {});
}

}  // namespace furlong
