#pragma once

// A corpus and a training run small enough for unit tests.

#include <filesystem>
#include <string>
#include <vector>

#include "furlong/train/config.h"

namespace furlong::testing_support {

/// An empty folder of this test's own below the system's temporary folder.
std::filesystem::path fresh_folder(const std::string& name);

/// Shards of documents drawn from a Markov chain over 64 of `vocab_size` tokens: something to learn, nothing to read.
void write_tiny_shards(const std::filesystem::path& folder, int64_t documents, int64_t tokens_each,
                       int64_t vocab_size = 256);

/// Two stages (12 steps of 4 rows of 32 tokens, 6 of 2 of 64) of configs/model/tiny.toml on the shards in `data`.
TrainConfig tiny_config(const std::filesystem::path& data, const std::vector<std::string>& assignments = {});

}  // namespace furlong::testing_support
