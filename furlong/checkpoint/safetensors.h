#pragma once

// The safetensors format: an 8-byte little-endian header length, a JSON header, then the tensors' bytes. Files are
// hostile input: everything is checked against the file's size before anything is allocated. No torch here.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "furlong/base/file.h"

namespace furlong {

/// "F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "U16", "U32", "U64", "C64", "F8_E4M3",
/// "F8_E5M2", "F8_E8M0".
int64_t safetensors_dtype_bytes(const std::string& dtype);  // 0 when unknown

struct TensorEntry {
  std::string dtype;
  std::vector<int64_t> shape;
  uint64_t offset = 0;  // from the start of the file; foreign writers need not align it
  uint64_t bytes = 0;
};

/// A mapped, validated file. FormatError names the file, the tensor and what is wrong.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::filesystem::path path);

  const std::map<std::string, TensorEntry>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  std::span<const std::byte> data(const TensorEntry& entry) const;
  const std::filesystem::path& path() const { return path_; }
  /// The header's length and text as they stand at the beginning of the file.
  std::span<const std::byte> header() const { return file_.bytes().first(header_bytes_); }

 private:
  std::filesystem::path path_;
  MappedFile file_;
  size_t header_bytes_ = 0;  // with its length
  std::map<std::string, TensorEntry> tensors_;
  std::map<std::string, std::string> metadata_;
};

struct TensorLayout {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
};

/// Writes one file tensor by tensor, in the order of `tensors`, of which none need be in memory before its turn. The
/// file is synced and renamed into place by commit(); without it no trace is left.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<TensorLayout>& tensors,
                    const std::map<std::string, std::string>& metadata = {});
  /// The next tensor's bytes. UsageError when they are not as many as its dtype and shape take.
  void append(std::span<const std::byte> data);
  void commit();

 private:
  std::filesystem::path path_;
  std::vector<std::pair<std::string, uint64_t>> tensors_;  // name and bytes
  size_t next_ = 0;
  AtomicFile file_;
};

struct TensorSource {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

/// Writes one file: synced, then renamed into place. Tensors stand in the order given.
void write_safetensors(const std::filesystem::path& path, const std::vector<TensorSource>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace furlong
