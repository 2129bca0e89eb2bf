#pragma once

// A saved checkpoint made wrong, for tests of loading.

#include <filesystem>
#include <functional>
#include <string>

#include "furlong/checkpoint/named_tensors.h"

namespace furlong {

/// Rewrites the tensor file of a folder with its tensors changed, without a checksum, as other writers do.
inline void edit_tensors(const std::filesystem::path& folder, const std::function<void(NamedTensors&)>& change) {
  NamedTensors tensors;
  {
    const CheckpointReader reader(folder);
    for (const std::string& name : reader.names()) tensors.emplace_back(name, reader.tensor(name));
  }
  change(tensors);
  write_tensors(folder / "model.safetensors", tensors);
}

}  // namespace furlong
