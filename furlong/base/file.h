#pragma once

// Files: reading whole, mapping, and writing so that a reader sees the old content or the new, never half of it.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace furlong {

/// The whole content. Throws IoError naming the path.
std::string read_file(const std::filesystem::path& path);

/// A read-only map of a whole file. Empty files map to an empty span.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// A file written under a temporary name beside its own, synced and renamed by commit(). Destroyed without commit() it
/// leaves no trace. Every failure (full disk, no permission) throws IoError naming the path.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size_bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

void write_file_atomic(const std::filesystem::path& path, std::string_view content);

/// Makes a folder appear whole or not at all: `fill` writes into a temporary folder beside `path`, whose files are
/// synced, then the folder is renamed to `path` (replacing an older one). Left-over temporaries of killed runs start
/// with '.' and end in ".partial"; they are removed here and never read.
void write_folder_atomic(const std::filesystem::path& path,
                         const std::function<void(const std::filesystem::path& temporary)>& fill);

/// Syncs a folder's entries to disk.
void sync_folder(const std::filesystem::path& path);

/// Creates a folder and its parents. Throws IoError naming the path.
void make_folders(const std::filesystem::path& path);

}  // namespace furlong
