#pragma once

// The checkpoints of a run: RUN/checkpoints/step-000123/, and RUN/checkpoints/latest with the newest one's name.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace furlong {

class Checkpoints {
 public:
  Checkpoints(const std::filesystem::path& run_folder, int64_t keep)
      : folder_(run_folder / "checkpoints"), keep_(keep) {}

  std::filesystem::path path(int64_t step) const;
  /// Steps of the complete folders, newest first. (A folder gets its name by a rename after everything in it is on the
  /// disk; what a killed run leaves half done has a hidden name that ends in ".partial".)
  std::vector<int64_t> steps() const;

  /// Writes a checkpoint: `fill` writes the files. Then `latest` names it, then all but the newest `keep` are deleted.
  void save(int64_t step, const std::function<void(const std::filesystem::path&)>& fill);

  /// Removes what killed runs left half written.
  void remove_leftovers();
  /// Renames the checkpoint to step-000123.damaged, so that it is neither resumed from nor counted. Returns the new
  /// path.
  std::filesystem::path set_aside(int64_t step);
  /// Makes `latest` name this checkpoint.
  void point_latest(int64_t step);

 private:
  void prune();

  std::filesystem::path folder_;
  int64_t keep_;
};

}  // namespace furlong
