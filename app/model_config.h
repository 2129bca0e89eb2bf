#pragma once

// The model that a path on the command line means.

#include <filesystem>

#include "furlong/model/config.h"

namespace furlong::app {

/// A model TOML, a training TOML (its model), a config.json, a checkpoint folder, or a run folder (its newest
/// checkpoint).
ModelConfig load_model_config(const std::filesystem::path& path);

}  // namespace furlong::app
