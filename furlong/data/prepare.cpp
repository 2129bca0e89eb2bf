#include "furlong/data/prepare.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/json.h"
#include "furlong/base/parallel.h"
#include "furlong/base/rng.h"
#include "furlong/tokenizer/tokenizer.h"

namespace furlong {

namespace fs = std::filesystem;

namespace {

// Text gathered before it is encoded by all threads together.
constexpr size_t kBatchBytes = size_t{8} << 20;

/// Encodes documents in parallel and appends them to the shards in their order.
class Encoder {
 public:
  Encoder(const Tokenizer& tokenizer, const PrepareOptions& options, ShardWriter& train, ShardWriter* val)
      : tokenizer_(tokenizer), options_(options), train_(train), val_(val), end_(tokenizer.end_of_document()) {}

  void add(std::string_view text) {
    batch_.emplace_back(text);
    batch_bytes_ += text.size();
    if (batch_bytes_ >= kBatchBytes) flush();
  }

  void flush() {
    std::vector<std::vector<int64_t>> tokens(batch_.size());
    parallel_for(0, static_cast<int64_t>(batch_.size()), 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        tokens[i] = tokenizer_.encode(batch_[i]);
        tokens[i].push_back(end_);
      }
    });
    for (size_t i = 0; i < batch_.size(); ++i) {
      const bool held_out = val_ != nullptr && is_val_document(index_, options_.val_fraction, options_.seed);
      (held_out ? *val_ : train_).add_document(tokens[i], static_cast<int64_t>(batch_[i].size()));
      ++index_;
    }
    batch_.clear();
    batch_bytes_ = 0;
  }

 private:
  const Tokenizer& tokenizer_;
  const PrepareOptions& options_;
  ShardWriter& train_;
  ShardWriter* val_;
  int64_t end_;
  int64_t index_ = 0;
  std::vector<std::string> batch_;
  size_t batch_bytes_ = 0;
};

bool holds_shards(const fs::path& folder) {
  const fs::path meta = folder / "meta.json";
  try {
    return fs::exists(meta) && read_json(meta).value("format", "") == "furlong-shards";
  } catch (const std::exception&) {
    return false;
  }
}

/// `out` without a trailing slash. Refuses to replace what `furlong data prepare` has not written.
fs::path checked_target(const fs::path& out) {
  fs::path target = fs::absolute(out).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();
  if (!fs::exists(target)) return target;
  if (!fs::is_directory(target)) throw UsageError(out.string() + ": is a file, need a folder to write");
  if (!fs::is_empty(target) && !holds_shards(target) && !holds_shards(target / "train")) {
    throw UsageError(out.string() + ": holds other files, need a new folder or one with token shards to replace");
  }
  return target;
}

void copy_tokenizer(const Tokenizer& tokenizer, const fs::path& source, const fs::path& folder) {
  const fs::path from = fs::is_directory(source) ? source : source.parent_path();
  const std::string ranks = read_file(fs::is_directory(source) ? source / "tiktoken.model" : source);
  write_file_atomic(folder / "tiktoken.model", ranks);
  if (fs::exists(from / "tokenizer_config.json")) {
    write_file_atomic(folder / "tokenizer_config.json", read_file(from / "tokenizer_config.json"));
  }
  // A tokenizer replaced while the corpus was encoded must not end up beside the tokens of the old one.
  if (Tokenizer::load(folder).sha256() != tokenizer.sha256()) {
    throw IoError(source.string() + ": changed while it was in use");
  }
}

ShardTotals finish(ShardWriter& writer, const Tokenizer& tokenizer, const PrepareOptions& options,
                   const fs::path& folder) {
  copy_tokenizer(tokenizer, options.tokenizer, folder);
  return writer.finish(tokenizer.sha256(), tokenizer.end_of_document());
}

}  // namespace

bool is_val_document(int64_t index, double fraction, uint64_t seed) {
  // Stratum s holds the documents ceil(s / fraction) to ceil((s + 1) / fraction) - 1.
  const auto begin_of = [&](int64_t stratum) {
    return static_cast<int64_t>(std::ceil(static_cast<double>(stratum) / fraction));
  };
  auto stratum = static_cast<int64_t>(static_cast<double>(index) * fraction);
  while (begin_of(stratum + 1) <= index) ++stratum;
  while (begin_of(stratum) > index) --stratum;
  const int64_t begin = begin_of(stratum);
  const auto size = static_cast<uint64_t>(begin_of(stratum + 1) - begin);
  return index == begin + static_cast<int64_t>(Rng(seed, static_cast<uint64_t>(stratum)).below(size));
}

PrepareReport prepare_shards(const PrepareOptions& options) {
  if (!(options.val_fraction >= 0.0 && options.val_fraction <= 0.5)) {
    throw UsageError("[data prepare] --val-fraction: got " + std::to_string(options.val_fraction) + ", need 0 to 0.5");
  }
  const fs::path target = checked_target(options.out);
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
  const bool split = options.val_fraction > 0.0;
  PrepareReport report;
  write_folder_atomic(target, [&](const fs::path& temporary) {
    const fs::path train_folder = split ? temporary / "train" : temporary;
    const fs::path val_folder = temporary / "val";
    make_folders(train_folder);
    ShardWriter train(train_folder, tokenizer.vocab_size(), options.shard_tokens);
    std::unique_ptr<ShardWriter> val;
    if (split) {
      make_folders(val_folder);
      val = std::make_unique<ShardWriter>(val_folder, tokenizer.vocab_size(), options.shard_tokens);
    }
    Encoder encoder(tokenizer, options, train, val.get());
    report.corpus = read_corpus(options.corpus, [&](std::string_view text) { encoder.add(text); });
    encoder.flush();
    report.train = finish(train, tokenizer, options, train_folder);
    if (!split) return;
    report.val = finish(*val, tokenizer, options, val_folder);
    if (report.train.documents == 0 || report.val.documents == 0) {
      throw UsageError("[data prepare] --val-fraction: " + std::to_string(report.corpus.documents) +
                       " documents are too few to split; cut them with --split-on, or name files with --only");
    }
  });
  return report;
}

}  // namespace furlong
