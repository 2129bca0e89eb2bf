// A conversation in JSON.

#include "furlong/tokenizer/chat.h"

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  furlong::fuzz::accepts([&] { furlong::parse_chat({reinterpret_cast<const char*>(data), size}, "fuzz"); });
  return 0;
}
