#include <sys/mman.h>
#include <unistd.h>

#include "tests/fuzz/fuzz.h"

namespace furlong::fuzz {

MemoryFile::MemoryFile(std::string_view bytes) : descriptor_(memfd_create("fuzz", 0)) {
  require(descriptor_ >= 0);
  require(write(descriptor_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  path_ = "/proc/self/fd/" + std::to_string(descriptor_);
}

MemoryFile::~MemoryFile() {
  close(descriptor_);
}

}  // namespace furlong::fuzz
