#pragma once

// Where the checkpoints of a run lie:
//   RUN/checkpoints/step-000123/   RUN/checkpoints/latest (the name of the newest whole one)

#include <filesystem>

namespace furlong {

/// The checkpoint folder meant by `path`: itself when it holds config.json, else the newest one of a run folder.
/// IoError when it is neither, UsageError when the run has no checkpoint yet.
std::filesystem::path find_checkpoint(const std::filesystem::path& path);

}  // namespace furlong
