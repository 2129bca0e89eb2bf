#pragma once

// What a run knows of its data folders beside the tokens.

#include <filesystem>

#include "furlong/base/json.h"
#include "furlong/train/config.h"

namespace furlong {

/// Content of every source of every stage (tokens, documents, tokenizer), so that a resumed run finds out when a folder
/// holds something else. UsageError when two sources were made with different tokenizers or the vocabulary does not
/// fit the model.
OrderedJson describe_data(const TrainConfig& config);

/// Copies the tokenizer's files that lie beside the shards of the first source.
void copy_tokenizer(const TrainConfig& config, const std::filesystem::path& folder);

}  // namespace furlong
