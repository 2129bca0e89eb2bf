#include "furlong/checkpoint/run_folder.h"

#include "furlong/base/error.h"
#include "furlong/base/file.h"

namespace furlong {

namespace fs = std::filesystem;

fs::path find_checkpoint(const fs::path& path) {
  std::error_code code;
  if (!fs::is_directory(path, code)) throw IoError(path.string() + ": no such folder");
  if (fs::exists(path / "config.json", code)) return path;
  const fs::path latest = path / "checkpoints" / "latest";
  if (!fs::exists(latest, code)) {
    throw UsageError(path.string() + ": neither a checkpoint (config.json) nor a run with one (checkpoints/latest)");
  }
  std::string name = read_file(latest);
  while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
  if (name.empty() || name != fs::path(name).filename().string()) {
    throw FormatError(latest.string() + ": does not hold the name of a checkpoint folder");
  }
  const fs::path folder = path / "checkpoints" / name;
  if (!fs::exists(folder / "config.json", code))
    throw FormatError(latest.string() + ": names '" + name + "', which is not there");
  return folder;
}

}  // namespace furlong
