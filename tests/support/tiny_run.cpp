#include "tests/support/tiny_run.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "furlong/base/file.h"
#include "furlong/base/rng.h"
#include "furlong/data/shard_writer.h"

namespace furlong::testing_support {

namespace fs = std::filesystem;

fs::path fresh_folder(const std::string& name) {
  const fs::path folder = fs::temp_directory_path() / fmt::format("furlong_{}_{}", name, getpid());
  fs::remove_all(folder);
  make_folders(folder);
  return folder;
}

void write_tiny_shards(const fs::path& folder, int64_t documents, int64_t tokens_each, int64_t vocab_size) {
  make_folders(folder);
  ShardWriter writer(folder, vocab_size);
  for (int64_t document = 0; document < documents; ++document) {
    Rng rng(7, static_cast<uint64_t>(document));
    std::vector<int64_t> tokens;
    int64_t token = static_cast<int64_t>(rng.below(64));
    for (int64_t t = 0; t < tokens_each + document % 5; ++t) {
      tokens.push_back(token);
      token = rng.uniform() < 0.8 ? (token * 5 + 3) % 64 : static_cast<int64_t>(rng.below(64));
    }
    writer.add_document(tokens, static_cast<int64_t>(tokens.size()) * 3);
  }
  writer.finish("0123456789abcdef", -1);
}

TrainConfig tiny_config(const fs::path& data, const std::vector<std::string>& assignments) {
  const std::string text = fmt::format(R"(
seed = 3
model = "configs/model/tiny.toml"
[[data.sources]]
name = "tiny"
path = "{}"
[[stages]]
name = "short"
context = 32
steps = 12
rows = 4
[[stages]]
name = "long"
context = 64
steps = 6
rows = 2
micro_rows = 1
[schedule]
peak_lr = 5e-3
[checkpoint]
every_steps = 5
[log]
detail_every = 4
)",
                                       data.string());
  return TrainConfig::from_document(ConfigDocument::from_text(text, "tiny"), FURLONG_SOURCE_DIR, assignments);
}

}  // namespace furlong::testing_support
