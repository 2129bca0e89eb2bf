#pragma once

// What a Hugging Face folder says beside the architecture.

#include <cstdint>
#include <filesystem>
#include <vector>

#include "furlong/base/json.h"

namespace furlong {

/// The "quantization_config" of a folder's config.json, inside "text_config" or beside it; null when it has none.
Json quantization_of(const std::filesystem::path& folder);

/// The ids that end a reply: "eos_token_id" (a number or a list) of generation_config.json, else of config.json, else
/// none. ConfigError naming file and key when it is something else or not below `vocab_size`.
std::vector<int64_t> stop_ids_of(const std::filesystem::path& folder, int64_t vocab_size);

}  // namespace furlong
