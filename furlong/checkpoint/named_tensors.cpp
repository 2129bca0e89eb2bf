#include "furlong/checkpoint/named_tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <string_view>

#include "furlong/base/error.h"
#include "furlong/checkpoint/checksum.h"
#include "furlong/checkpoint/safetensors.h"
#include "furlong/checkpoint/shard_index.h"

namespace furlong {

namespace fs = std::filesystem;

namespace {

constexpr const char* kChecksumKey = "furlong.checksum";

constexpr std::array<std::pair<std::string_view, at::ScalarType>, 17> kScalarTypes = {{
    {"F64", at::kDouble},
    {"F32", at::kFloat},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
    {"U16", at::kUInt16},
    {"U32", at::kUInt32},
    {"U64", at::kUInt64},
    {"C64", at::kComplexFloat},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"F8_E8M0", at::kFloat8_e8m0fnu},
}};

}  // namespace

at::ScalarType tensor_dtype(const std::string& dtype) {
  for (const auto& [name, type] : kScalarTypes) {
    if (name == dtype) return type;
  }
  throw FormatError("dtype '" + dtype + "' has no tensor type");
}

namespace {

std::string dtype_name(const std::string& tensor, at::ScalarType type) {
  for (const auto& [name, known] : kScalarTypes) {
    if (known == type) return std::string(name);
  }
  throw UsageError("tensor '" + tensor + "': safetensors cannot hold " + c10::toString(type));
}

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

void append(std::string* text, const std::string& part) {
  *text += std::to_string(part.size()) + ':' + part;
}

/// Over everything the file says: names, dtypes, shapes, bytes, and the metadata other than the checksum itself.
/// `sources` in the order of their names.
std::string content_checksum(const std::vector<TensorSource>& sources,
                             const std::map<std::string, std::string>& metadata) {
  std::string text;
  for (const auto& [key, value] : metadata) {
    if (key == kChecksumKey) continue;
    append(&text, key);
    append(&text, value);
  }
  for (const TensorSource& source : sources) {
    append(&text, source.name);
    append(&text, source.dtype);
    for (const int64_t size : source.shape) text += std::to_string(size) + ',';
    text += checksum_text(checksum64(source.data));
  }
  return checksum_text(checksum64(std::as_bytes(std::span(text))));
}

std::string content_checksum(const SafetensorsFile& file) {
  std::vector<TensorSource> sources;
  for (const auto& [name, entry] : file.tensors())
    sources.push_back({name, entry.dtype, entry.shape, file.data(entry)});
  return content_checksum(sources, file.metadata());
}

void verify(const SafetensorsFile& file) {
  const auto stored = file.metadata().find(kChecksumKey);
  if (stored == file.metadata().end()) return;
  const std::string found = content_checksum(file);
  if (found == stored->second) return;
  throw FormatError(file.path().string() + ": damaged: the content's checksum is " + found + ", the file says " +
                    stored->second);
}

at::Tensor copy_of(const TensorEntry& entry, std::span<const std::byte> data) {
  at::Tensor result = at::empty(entry.shape, at::TensorOptions(tensor_dtype(entry.dtype)));
  if (!data.empty()) std::memcpy(result.mutable_data_ptr(), data.data(), data.size());
  return result;
}

/// The tensors of a file in the order of their data.
std::vector<std::pair<std::string, TensorEntry>> in_file_order(const SafetensorsFile& file) {
  std::vector<std::pair<std::string, TensorEntry>> result(file.tensors().begin(), file.tensors().end());
  std::stable_sort(result.begin(), result.end(),
                   [](const auto& a, const auto& b) { return a.second.offset < b.second.offset; });
  return result;
}

/// What stands in place of a tensor of `file`; in its dtype and shape.
at::Tensor replacement(const SafetensorsFile& file, const std::string& name, const TensorEntry& entry,
                       const std::function<at::Tensor(const std::string&)>& value_of) {
  const at::Tensor value = value_of(name);
  if (!value.defined()) return copy_of(entry, file.data(entry));
  if (c10::multiply_integers(entry.shape) != value.numel()) {
    throw UsageError(file.path().string() + ": tensor '" + name + "': got " + std::to_string(value.numel()) +
                     " values for " + std::to_string(entry.bytes) + " bytes of " + entry.dtype);
  }
  return value.detach().to(at::kCPU).to(tensor_dtype(entry.dtype)).contiguous().reshape(entry.shape);
}

/// The index to read, or nothing when `path` is, or holds, a single file.
fs::path find_index(const fs::path& path, const std::string& stem, fs::path* single) {
  if (!fs::is_directory(path)) {
    if (path.extension() == ".json") return path;
    *single = path;
    return {};
  }
  const fs::path file = path / (stem + ".safetensors");
  const fs::path index = path / (stem + ".safetensors.index.json");
  const bool has_file = fs::exists(file);
  if (has_file && fs::exists(index)) {
    throw FormatError(path.string() + ": holds both " + file.filename().string() + " and " + index.filename().string() +
                      "; remove one, or name the one to read");
  }
  if (has_file) {
    *single = file;
    return {};
  }
  if (!fs::exists(index)) {
    throw IoError(path.string() + ": holds neither " + file.filename().string() + " nor " + index.filename().string());
  }
  return index;
}

/// All missing shards at once: who copies a checkpoint wants the whole list.
void check_present(const fs::path& index, const std::set<std::string>& shards) {
  std::string missing;
  for (const std::string& shard : shards) {
    if (!fs::exists(index.parent_path() / shard)) missing += (missing.empty() ? "" : ", ") + shard;
  }
  if (!missing.empty()) throw IoError(index.string() + ": files that it lists are missing: " + missing);
}

}  // namespace

CheckpointReader::CheckpointReader(const fs::path& file_or_folder, const std::string& stem) {
  fs::path single;
  const fs::path index = find_index(file_or_folder, stem, &single);
  std::map<std::string, std::string> shard_of;
  std::set<std::string> shards;
  if (index.empty()) {
    files_.push_back(std::make_unique<SafetensorsFile>(single));
  } else {
    shard_of = read_shard_index(index);
    for (const auto& [name, shard] : shard_of) shards.insert(shard);
    check_present(index, shards);
    for (const std::string& shard : shards) {
      files_.push_back(std::make_unique<SafetensorsFile>(index.parent_path() / shard));
    }
  }
  for (size_t i = 0; i < files_.size(); ++i) {
    for (const auto& [name, entry] : files_[i]->tensors()) {
      const auto listed = shard_of.find(name);
      if (!index.empty() && (listed == shard_of.end() || listed->second != files_[i]->path().filename())) {
        throw FormatError(files_[i]->path().string() + ": tensor '" + name + "': " + index.filename().string() +
                          (listed == shard_of.end() ? " does not list it" : " says that it is in " + listed->second));
      }
      file_of_[name] = i;
    }
  }
  for (const auto& [name, shard] : shard_of) {
    if (file_of_.count(name) > 0) continue;
    throw FormatError((index.parent_path() / shard).string() + ": tensor '" + name + "' is missing, " +
                      index.filename().string() + " lists it there");
  }
  verified_.assign(files_.size(), false);
}

CheckpointReader::~CheckpointReader() = default;

const SafetensorsFile& CheckpointReader::file_with(const std::string& name) const {
  const auto found = file_of_.find(name);
  if (found != file_of_.end()) return *files_[found->second];
  throw FormatError(files_.front()->path().string() + (files_.size() > 1 ? " and the other shards" : "") +
                    ": there is no tensor '" + name + "'");
}

std::vector<std::string> CheckpointReader::names() const {
  std::vector<std::string> result;
  for (const auto& [name, file] : file_of_) result.push_back(name);
  return result;
}

bool CheckpointReader::contains(const std::string& name) const {
  return file_of_.count(name) > 0;
}

std::vector<int64_t> CheckpointReader::shape(const std::string& name) const {
  return file_with(name).tensors().at(name).shape;
}

std::string CheckpointReader::dtype(const std::string& name) const {
  return file_with(name).tensors().at(name).dtype;
}

std::map<std::string, std::string> CheckpointReader::metadata() const {
  std::map<std::string, std::string> result;
  for (const auto& file : files_) result.insert(file->metadata().begin(), file->metadata().end());
  return result;
}

uint64_t CheckpointReader::byte_size(const std::string& name) const {
  return file_with(name).tensors().at(name).bytes;
}

std::vector<fs::path> CheckpointReader::files() const {
  std::vector<fs::path> result;
  for (const auto& file : files_) result.push_back(file->path());
  return result;
}

std::span<const std::byte> CheckpointReader::bytes(const std::string& name) const {
  const SafetensorsFile& file = file_with(name);
  const size_t index = file_of_.at(name);
  if (!verified_[index]) {
    verify(file);
    verified_[index] = true;
  }
  return file.data(file.tensors().at(name));
}

at::Tensor CheckpointReader::tensor(const std::string& name) const {
  return copy_of(file_with(name).tensors().at(name), bytes(name));
}

void write_tensors(const fs::path& path, const NamedTensors& tensors, std::map<std::string, std::string> metadata) {
  std::vector<at::Tensor> copies;  // keeps the bytes alive
  std::vector<TensorSource> sources;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) throw UsageError(path.string() + ": tensor '" + name + "' is undefined");
    copies.push_back(tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous());
    const at::Tensor& copy = copies.back();
    sources.push_back({name, dtype_name(name, copy.scalar_type()), copy.sizes().vec(), bytes_of(copy)});
  }
  std::vector<TensorSource> by_name = sources;
  std::sort(by_name.begin(), by_name.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  metadata[kChecksumKey] = content_checksum(by_name, metadata);
  write_safetensors(path, sources, metadata);
}

void write_tensors_like(const fs::path& source, const fs::path& path,
                        const std::function<at::Tensor(const std::string& name)>& value_of) {
  const SafetensorsFile file(source);
  const auto entries = in_file_order(file);
  if (file.metadata().count(kChecksumKey) > 0) {
    NamedTensors tensors;
    for (const auto& [name, entry] : entries) tensors.emplace_back(name, replacement(file, name, entry, value_of));
    write_tensors(path, tensors, file.metadata());
    return;
  }
  AtomicFile out(path);
  const std::span<const std::byte> header = file.header();
  out.write(header.data(), header.size());
  for (const auto& [name, entry] : entries) {
    const at::Tensor tensor = replacement(file, name, entry, value_of);
    out.write(tensor.const_data_ptr(), tensor.nbytes());
  }
  out.commit();
}

std::string tensor_checksum(const at::Tensor& tensor) {
  const at::Tensor copy = tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous();
  return checksum_text(checksum64(bytes_of(copy)));
}

}  // namespace furlong
