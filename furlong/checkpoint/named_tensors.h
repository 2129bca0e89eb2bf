#pragma once

// Tensors by name, to and from checkpoint folders. Knows no model.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace furlong {

class SafetensorsFile;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// One safetensors file, one index file, or a folder: model.safetensors, or the shards that
/// model.safetensors.index.json lists, honoured exactly (a missing shard, a tensor in the wrong shard or in none is a
/// FormatError / IoError naming it; so is a folder that holds both). Not for several threads at once.
class CheckpointReader {
 public:
  explicit CheckpointReader(const std::filesystem::path& file_or_folder, const std::string& stem = "model");
  ~CheckpointReader();

  std::vector<std::string> names() const;
  bool contains(const std::string& name) const;
  std::vector<int64_t> shape(const std::string& name) const;
  std::string dtype(const std::string& name) const;
  uint64_t byte_size(const std::string& name) const;
  /// The mapped bytes as they stand in the file, alive as long as the reader. Verified as those of tensor().
  std::span<const std::byte> bytes(const std::string& name) const;
  std::map<std::string, std::string> metadata() const;
  /// The files that hold the tensors.
  std::vector<std::filesystem::path> files() const;
  /// A copy in memory. FormatError when there is none of this name. Where the file's metadata holds a checksum of its
  /// data (see write_tensors), it is verified before the first tensor is handed out.
  at::Tensor tensor(const std::string& name) const;

 private:
  const SafetensorsFile& file_with(const std::string& name) const;

  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, size_t> file_of_;
  mutable std::vector<bool> verified_;
};

/// Writes tensors to one safetensors file, atomically, with a checksum of the data in its metadata. Tensors of any
/// device; made contiguous first.
void write_tensors(const std::filesystem::path& path, const NamedTensors& tensors,
                   std::map<std::string, std::string> metadata = {});

/// Writes a file laid out as `source`: its header byte for byte, and for each tensor the value that `value_of` gives
/// (cast to the file's dtype; as many elements), or the source's own bytes where it gives an undefined tensor. One
/// tensor is in memory at a time. A checksum in the metadata (see write_tensors) is renewed; then all of them are.
void write_tensors_like(const std::filesystem::path& source, const std::filesystem::path& path,
                        const std::function<at::Tensor(const std::string& name)>& value_of);

/// The tensor type of a safetensors dtype. FormatError when there is none.
at::ScalarType tensor_dtype(const std::string& dtype);

/// 64-bit checksum as 16 hex digits, over a tensor's bytes (see checksum.h).
std::string tensor_checksum(const at::Tensor& tensor);

}  // namespace furlong
