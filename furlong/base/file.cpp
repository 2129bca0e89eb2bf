#include "furlong/base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "furlong/base/error.h"

namespace furlong {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail(const std::string& what, const fs::path& path) {
  const int code = errno;
  throw IoError(path.string() + ": cannot " + what + ": " + std::strerror(code));
}

/// A file descriptor that closes itself.
class Descriptor {
 public:
  Descriptor(const fs::path& path, int flags, const std::string& what) : value_(open(path.c_str(), flags | O_CLOEXEC)) {
    if (value_ < 0) fail(what, path);
  }
  ~Descriptor() { close(value_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

size_t file_size_bytes(const Descriptor& file, const fs::path& path) {
  struct stat status {};
  if (fstat(file.get(), &status) != 0) fail("stat", path);
  if (!S_ISREG(status.st_mode)) throw IoError(path.string() + ": is not a regular file");
  return static_cast<size_t>(status.st_size);
}

}  // namespace

std::string read_file(const fs::path& path) {
  const Descriptor file(path, O_RDONLY, "open");
  std::string content(file_size_bytes(file, path), '\0');
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t got = read(file.get(), content.data() + done, content.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  content.resize(done);
  return content;
}

MappedFile::MappedFile(const fs::path& path) {
  const Descriptor file(path, O_RDONLY, "open");
  size_ = file_size_bytes(file, path);
  if (size_ == 0) return;
  void* data = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) fail("map", path);
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

AtomicFile::AtomicFile(fs::path path) : path_(std::move(path)) {
  temporary_ = path_.parent_path() / ("." + path_.filename().string() + "." + std::to_string(getpid()) + ".partial");
  descriptor_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail("create", path_);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t size_bytes) {
  const char* cursor = static_cast<const char*>(data);
  while (size_bytes > 0) {
    const ssize_t written = ::write(descriptor_, cursor, size_bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write", path_);
    cursor += written;
    size_bytes -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  if (fsync(descriptor_) != 0) fail("sync", path_);
  if (close(std::exchange(descriptor_, -1)) != 0) fail("close", path_);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename into place", path_);
  temporary_.clear();
  sync_folder(path_.parent_path().empty() ? fs::path(".") : path_.parent_path());
}

void write_file_atomic(const fs::path& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

void write_folder_atomic(const fs::path& path, const std::function<void(const fs::path&)>& fill) {
  const fs::path parent = path.parent_path().empty() ? fs::path(".") : path.parent_path();
  make_folders(parent);
  const fs::path temporary = parent / ("." + path.filename().string() + ".partial");
  const fs::path old = parent / ("." + path.filename().string() + ".old.partial");
  std::error_code ignored;
  fs::remove_all(temporary, ignored);
  // A run killed between the two renames below leaves only the old version: put it back before anything else.
  if (fs::exists(old) && !fs::exists(path)) fs::rename(old, path, ignored);
  fs::remove_all(old, ignored);
  make_folders(temporary);
  try {
    fill(temporary);
    for (const auto& entry : fs::recursive_directory_iterator(temporary)) {
      if (!entry.is_regular_file()) continue;
      const Descriptor file(entry.path(), O_RDONLY, "open");
      if (fsync(file.get()) != 0) fail("sync", entry.path());
    }
    sync_folder(temporary);
    if (fs::exists(path) && rename(path.c_str(), old.c_str()) != 0) fail("replace", path);
    if (rename(temporary.c_str(), path.c_str()) != 0) fail("rename into place", path);
  } catch (...) {
    fs::remove_all(temporary, ignored);
    throw;
  }
  sync_folder(parent);
  fs::remove_all(old, ignored);
}

void sync_folder(const fs::path& path) {
  const Descriptor folder(path, O_RDONLY | O_DIRECTORY, "open");
  if (fsync(folder.get()) != 0) fail("sync", path);
}

void make_folders(const fs::path& path) {
  std::error_code code;
  fs::create_directories(path, code);
  if (code) throw IoError(path.string() + ": cannot create the folder: " + code.message());
}

}  // namespace furlong
