// model.safetensors.index.json: no accepted file name leaves the folder.

#include "furlong/checkpoint/shard_index.h"

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const furlong::fuzz::MemoryFile file({reinterpret_cast<const char*>(data), size});
  furlong::fuzz::accepts([&] {
    for (const auto& [tensor, shard] : furlong::read_shard_index(file.path())) {
      furlong::fuzz::require(!shard.empty() && shard.find('/') == std::string::npos && shard != "." && shard != "..");
    }
  });
  return 0;
}
