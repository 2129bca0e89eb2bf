#include "furlong/train/train_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/json_fault.h"

namespace furlong {

namespace fs = std::filesystem;

namespace {

constexpr const char* kFile = "train_state.json";
constexpr const char* kFormat = "furlong-train-state";
constexpr int kVersion = 1;

/// FNV-1a, 64 bits.
std::string checksum(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char byte : bytes) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3u;
  return fmt::format("{:016x}", hash);
}

OrderedJson describe_files(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_regular_file() && entry.path().filename() != kFile) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  OrderedJson list = OrderedJson::object();
  for (const fs::path& file : files) {
    OrderedJson entry = {{"bytes", static_cast<int64_t>(fs::file_size(file))}};
    if (file.extension() != ".safetensors") entry["checksum"] = checksum(read_file(file));
    list[file.filename().string()] = entry;
  }
  return list;
}

void verify_file(const fs::path& file, const Json& entry) {
  std::error_code code;
  const auto size = static_cast<int64_t>(fs::file_size(file, code));
  if (code) throw FormatError(file.string() + ": is missing");
  if (size != entry.value("bytes", int64_t{-1})) {
    throw FormatError(fmt::format("{}: has {} bytes, {} were written", file.string(), size, entry["bytes"].dump()));
  }
  if (entry.contains("checksum") && entry["checksum"] != checksum(read_file(file))) {
    throw FormatError(file.string() + ": the checksum does not fit its content");
  }
}

}  // namespace

OrderedJson TrainState::to_json() const {
  return {{"step", step},     {"tokens", tokens},   {"optimizer_steps", optimizer_steps},
          {"cursor", cursor}, {"monitor", monitor}, {"config", config},
          {"data", data},     {"threads", threads}, {"version", version}};
}

TrainState TrainState::from_json(const Json& values, const std::string& where) {
  TrainState state;
  try {
    values.at("step").get_to(state.step);
    values.at("tokens").get_to(state.tokens);
    values.at("optimizer_steps").get_to(state.optimizer_steps);
    state.cursor = values.at("cursor");
    state.monitor = values.at("monitor");
    state.config = values.at("config");
    state.data = values.at("data");
    values.at("threads").get_to(state.threads);
    values.at("version").get_to(state.version);
  } catch (const Json::exception& error) {
    throw FormatError(fmt::format("{}: not a training state: {}", where, json_fault(error)));
  }
  return state;
}

void write_train_state(const fs::path& folder, const TrainState& state) {
  const OrderedJson content = {{"files", describe_files(folder)}, {"state", state.to_json()}};
  write_json_atomic(
      folder / kFile,
      {{"format", kFormat}, {"version", kVersion}, {"checksum", checksum(Json(content).dump())}, {"content", content}});
}

TrainState read_train_state(const fs::path& folder) {
  const fs::path path = folder / kFile;
  if (!fs::exists(path)) throw FormatError(path.string() + ": is missing");
  try {
    const Json document = read_json(path);
    if (document.at("format") != kFormat) throw FormatError(path.string() + ": not a training state");
    if (document.at("version") != kVersion) {
      throw FormatError(fmt::format("{}: is of version {}, this program reads {}", path.string(),
                                    document["version"].dump(), kVersion));
    }
    const Json& content = document.at("content");
    if (document.at("checksum") != checksum(content.dump())) {
      throw FormatError(path.string() + ": the checksum does not fit its content");
    }
    for (const auto& [name, entry] : content.at("files").items()) verify_file(folder / name, entry);
    return TrainState::from_json(content.at("state"), path.string());
  } catch (const Json::exception& error) {
    throw FormatError(fmt::format("{}: not a training state: {}", path.string(), json_fault(error)));
  }
}

}  // namespace furlong
