// A model's configuration: published JSON, and TOML behind the letter t.

#include "furlong/base/config.h"
#include "furlong/base/json.h"
#include "furlong/model/config.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  furlong::fuzz::accepts([&] {
    if (!input.empty() && input[0] == 't') {
      furlong::ModelConfig::from_document(furlong::ConfigDocument::from_text(std::string(input.substr(1)), "fuzz"));
    } else {
      furlong::ModelConfig::from_hugging_face(furlong::parse_json(input, "fuzz"), "fuzz");
    }
  });
  return 0;
}
