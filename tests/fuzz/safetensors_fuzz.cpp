// A safetensors file: what is accepted lies inside the file, its parts side by side.

#include "furlong/checkpoint/safetensors.h"

#include "furlong/checkpoint/safetensors_header.h"
#include "tests/fuzz/fuzz.h"

namespace {

using furlong::fuzz::accepts;
using furlong::fuzz::require;

void header_of_any_size(std::string_view input) {
  if (input.size() < 8) return;
  uint64_t data_bytes = 0;
  __builtin_memcpy(&data_bytes, input.data(), 8);
  accepts([&] {
    const auto header = furlong::parse_safetensors_header(input.substr(8), data_bytes, "fuzz");
    uint64_t sum = 0;
    for (const auto& [name, entry] : header.tensors) {
      uint64_t bytes = 0;
      require(furlong::safetensors_bytes(entry.shape, 1, &bytes));
      sum += entry.bytes;
      require(entry.bytes <= data_bytes && entry.offset <= data_bytes - entry.bytes);
    }
    require(sum == data_bytes);
  });
}

void whole_file(std::string_view input) {
  const furlong::fuzz::MemoryFile file(input);
  accepts([&] {
    const furlong::SafetensorsFile tensors(file.path());
    unsigned sum = 0;
    for (const auto& [name, entry] : tensors.tensors()) {
      for (const std::byte x : tensors.data(entry)) sum += static_cast<unsigned>(x);
    }
    require(sum < ~0u);
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  header_of_any_size(input);
  whole_file(input);
  return 0;
}
