#pragma once

// Everything beside weights (router biases are among them) and moments that a run needs to go on bit by bit.

#include <cstdint>
#include <filesystem>
#include <string>

#include "furlong/base/json.h"

namespace furlong {

struct TrainState {
  int64_t step = 0;             // optimizer steps done, skipped ones included
  int64_t tokens = 0;           // consumed
  int64_t optimizer_steps = 0;  // taken
  Json cursor;                  // of the data
  Json monitor;
  OrderedJson config;  // resolved
  OrderedJson data;    // what the sources hold, see describe_data
  int64_t threads = 0;
  std::string version;  // of Furlong

  OrderedJson to_json() const;
  static TrainState from_json(const Json& values, const std::string& where);
};

/// Writes FOLDER/train_state.json: the state with a checksum of its own, and size and checksum of every other file of
/// the folder, which must be written before. (The data of safetensors files has checksums inside: only the size.)
void write_train_state(const std::filesystem::path& folder, const TrainState& state);

/// Reads and verifies it. FormatError or IoError names the file that is missing, damaged or of another version.
TrainState read_train_state(const std::filesystem::path& folder);

}  // namespace furlong
