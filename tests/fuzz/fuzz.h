#pragma once

// What the fuzzing programs share. A reader either succeeds or throws furlong::Error; anything else ends the program:
// another exception, a sanitizer's finding, more memory than libFuzzer's limit.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "furlong/base/error.h"

namespace furlong::fuzz {

/// Runs `read`; true if the input was accepted. A refusal must say something.
template <typename Read>
bool accepts(Read read) {
  try {
    read();
    return true;
  } catch (const Error& error) {
    if (std::string_view(error.what()).empty()) __builtin_trap();
    return false;
  }
}

inline void require(bool good) {
  if (!good) __builtin_trap();
}

/// The input in two parts at its first zero byte: a reader of two files.
struct Parts {
  std::string_view first, second;
};
inline Parts split(std::string_view input) {
  const size_t at = input.find('\0');
  if (at == std::string_view::npos) return {input, {}};
  return {input.substr(0, at), input.substr(at + 1)};
}

/// A file in memory with these bytes, for readers of files.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  int descriptor_;
  std::string path_;
};

}  // namespace furlong::fuzz
