#include "furlong/data/shards.h"

#include <algorithm>
#include <cstring>

#include "furlong/base/error.h"
#include "furlong/base/json.h"
#include "furlong/checkpoint/safetensors.h"

namespace furlong {

namespace fs = std::filesystem;

namespace {

// Token ids above this do not fit the formats of the stores.
constexpr int64_t kMaxVocabulary = int64_t{1} << 31;

Json read_meta(const fs::path& folder) {
  const fs::path path = folder / "meta.json";
  if (!fs::exists(folder)) throw IoError(folder.string() + ": there is no such folder");
  if (!fs::exists(path)) {
    throw FormatError(folder.string() +
                      ": is no folder of token shards (no meta.json); write one with `furlong data prepare`");
  }
  const Json meta = read_json(path);
  if (!meta.is_object() || meta.value("format", Json()) != "furlong-shards") {
    throw FormatError(path.string() + ": format is not 'furlong-shards'");
  }
  if (meta.value("version", Json()) != 1) throw FormatError(path.string() + ": need version 1");
  if (!meta.contains("vocab_size") || !meta["vocab_size"].is_number_integer() || meta["vocab_size"] < 1 ||
      meta["vocab_size"] > kMaxVocabulary) {
    throw FormatError(path.string() + ": vocab_size must be a whole number from 1 to 2^31");
  }
  if (!meta.contains("tokenizer_sha256") || !meta["tokenizer_sha256"].is_string()) {
    throw FormatError(path.string() + ": tokenizer_sha256 must be a string");
  }
  if (!meta.contains("shards") || !meta["shards"].is_array()) {
    throw FormatError(path.string() + ": shards must be an array");
  }
  return meta;
}

/// The named shard's path; it must be a plain file name of the folder.
fs::path shard_path(const fs::path& folder, const Json& shard) {
  if (!shard.is_object() || !shard.contains("file") || !shard["file"].is_string()) {
    throw FormatError((folder / "meta.json").string() + ": each shard needs a 'file'");
  }
  const fs::path name = shard["file"].get<std::string>();
  if (name.empty() || name != name.filename() || name == ".." || name == ".") {
    throw FormatError((folder / "meta.json").string() + ": shard file '" + name.string() + "' is not a plain name");
  }
  return folder / name;
}

const TensorEntry& entry_of(const SafetensorsFile& file, const std::string& name,
                            const std::vector<std::string>& dtypes) {
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end()) throw FormatError(file.path().string() + ": has no tensor '" + name + "'");
  const TensorEntry& entry = found->second;
  if (std::find(dtypes.begin(), dtypes.end(), entry.dtype) == dtypes.end() || entry.shape.size() != 1) {
    throw FormatError(file.path().string() + ": tensor '" + name + "' has the wrong type or shape");
  }
  return entry;
}

std::vector<int64_t> read_integers(const SafetensorsFile& file, const std::string& name) {
  const TensorEntry& entry = entry_of(file, name, {"I64"});
  std::vector<int64_t> values(static_cast<size_t>(entry.shape[0]));
  if (!values.empty()) std::memcpy(values.data(), file.data(entry).data(), values.size() * sizeof(int64_t));
  return values;
}

template <typename T>
int64_t widen(const std::byte* source, int64_t count, int64_t* out) {
  int64_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    T token;
    std::memcpy(&token, source + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    out[i] = static_cast<int64_t>(token);
    largest = std::max(largest, out[i]);
  }
  return largest;
}

}  // namespace

ShardSet::ShardSet(const fs::path& folder) {
  const Json meta = read_meta(folder);
  vocab_size_ = meta["vocab_size"].get<int64_t>();
  tokenizer_sha256_ = meta["tokenizer_sha256"].get<std::string>();
  for (const Json& shard : meta["shards"]) {
    const auto index = static_cast<int64_t>(shards_.size());
    shards_.push_back(std::make_unique<SafetensorsFile>(shard_path(folder, shard)));
    const SafetensorsFile& file = *shards_.back();
    const int64_t tokens = entry_of(file, "tokens", {"U16", "U32"}).shape[0];
    const std::vector<int64_t> offsets = read_integers(file, "document_offsets");
    const std::vector<int64_t> bytes = read_integers(file, "document_bytes");
    const auto count = static_cast<int64_t>(bytes.size());
    if (static_cast<int64_t>(offsets.size()) != count + 1 || offsets.front() != 0 || offsets.back() != tokens) {
      throw FormatError(file.path().string() + ": document_offsets do not cover the tokens");
    }
    if (shard.value("tokens", Json()) != tokens || shard.value("documents", Json()) != count) {
      throw FormatError(file.path().string() + ": holds " + std::to_string(tokens) + " tokens of " +
                        std::to_string(count) + " documents, meta.json says otherwise");
    }
    for (int64_t d = 0; d < count; ++d) {
      if (offsets[d + 1] < offsets[d] || bytes[d] < 0) {
        throw FormatError(file.path().string() + ": document " + std::to_string(d) + " has a negative size");
      }
      documents_.push_back({index, offsets[d], offsets[d + 1] - offsets[d], bytes[d]});
      num_bytes_ += bytes[d];
    }
    num_tokens_ += tokens;
  }
}

ShardSet::~ShardSet() = default;

void ShardSet::copy_tokens(int64_t document, int64_t first, int64_t count, int64_t* out) const {
  const Document& entry = documents_.at(static_cast<size_t>(document));
  if (first < 0 || count < 0 || first > entry.tokens - count) {
    throw UsageError("[shards] tokens: got " + std::to_string(first) + " + " + std::to_string(count) +
                     ", need a range within the document's " + std::to_string(entry.tokens));
  }
  const SafetensorsFile& file = *shards_[static_cast<size_t>(entry.shard)];
  const TensorEntry& tensor = file.tensors().at("tokens");
  const std::byte* data = file.data(tensor).data();
  const int64_t begin = entry.first_token + first;
  const int64_t largest = tensor.dtype == "U16" ? widen<uint16_t>(data + begin * 2, count, out)
                                                : widen<uint32_t>(data + begin * 4, count, out);
  if (largest >= vocab_size_) {
    throw FormatError(file.path().string() + ": holds token " + std::to_string(largest) + ", the vocabulary has " +
                      std::to_string(vocab_size_));
  }
}

}  // namespace furlong
