#include "furlong/train/run_data.h"

#include <fmt/format.h>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/data/shards.h"

namespace furlong {

namespace fs = std::filesystem;

OrderedJson describe_data(const TrainConfig& config) {
  OrderedJson stages = OrderedJson::array();
  std::string tokenizer;
  for (int64_t stage = 0; stage < static_cast<int64_t>(config.stages.size()); ++stage) {
    OrderedJson sources = OrderedJson::array();
    for (const SourceConfig& source : config.sources_of(stage)) {
      const ShardSet shards(source.path);
      if (shards.vocab_size() > config.model.vocab_size) {
        throw UsageError(
            fmt::format("{}: its tokenizer has {} entries, the model's vocab_size is {} (--set model.vocab_size={})",
                        source.path, shards.vocab_size(), config.model.vocab_size, shards.vocab_size()));
      }
      if (tokenizer.empty()) tokenizer = shards.tokenizer_sha256();
      if (shards.tokenizer_sha256() != tokenizer) {
        throw UsageError(source.path + ": was made with another tokenizer than the first source");
      }
      sources.push_back({{"name", source.name.empty() ? source.path : source.name},  // the cursor's key
                         {"tokens", shards.num_tokens()},
                         {"documents", shards.num_documents()},
                         {"tokenizer", shards.tokenizer_sha256()}});
    }
    stages.push_back(sources);
  }
  return stages;
}

void copy_tokenizer(const TrainConfig& config, const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(config.sources_of(0).front().path)) {
    const fs::path name = entry.path().filename();
    if (!entry.is_regular_file() || name == "meta.json" || name.extension() == ".safetensors") continue;
    if (name.string().starts_with(".")) continue;
    write_file_atomic(folder / name, read_file(entry.path()));
  }
}

}  // namespace furlong
