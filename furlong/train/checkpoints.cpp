#include "furlong/train/checkpoints.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <optional>

#include "furlong/base/error.h"
#include "furlong/base/file.h"

namespace furlong {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "step-";

std::optional<int64_t> step_of(const std::string& name) {
  if (!name.starts_with(kPrefix)) return {};
  int64_t step = 0;
  const char* last = name.data() + name.size();
  const auto [end, code] = std::from_chars(name.data() + kPrefix.size(), last, step);
  return code == std::errc() && end == last ? std::optional<int64_t>(step) : std::nullopt;
}

void rename_or_throw(const fs::path& from, const fs::path& to) {
  std::error_code code;
  fs::rename(from, to, code);
  if (code) throw IoError(fmt::format("{}: cannot rename to {}: {}", from.string(), to.string(), code.message()));
}

}  // namespace

fs::path Checkpoints::path(int64_t step) const {
  return folder_ / fmt::format("{}{:06}", kPrefix, step);
}

std::vector<int64_t> Checkpoints::steps() const {
  std::vector<int64_t> steps;
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(folder_, code)) {
    const std::optional<int64_t> step = step_of(entry.path().filename().string());
    if (step && entry.is_directory(code)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end(), std::greater<>());
  return steps;
}

void Checkpoints::save(int64_t step, const std::function<void(const fs::path&)>& fill) {
  write_folder_atomic(path(step), fill);
  point_latest(step);
  prune();
}

void Checkpoints::point_latest(int64_t step) {
  write_file_atomic(folder_ / "latest", path(step).filename().string() + "\n");
}

void Checkpoints::prune() {
  const std::vector<int64_t> all = steps();
  for (size_t i = static_cast<size_t>(keep_); i < all.size(); ++i) {
    // Hidden first: a deletion that is cut short must not leave half a folder under a checkpoint's name.
    const fs::path old = path(all[i]);
    const fs::path hidden = folder_ / ("." + old.filename().string() + ".delete.partial");
    rename_or_throw(old, hidden);
    std::error_code ignored;
    fs::remove_all(hidden, ignored);
  }
}

void Checkpoints::remove_leftovers() {
  std::error_code code;
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(folder_, code)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(".") && name.ends_with(".partial")) leftovers.push_back(entry.path());
  }
  for (const fs::path& path : leftovers) fs::remove_all(path, code);
}

fs::path Checkpoints::set_aside(int64_t step) {
  const fs::path aside = path(step).string() + ".damaged";
  std::error_code ignored;
  fs::remove_all(aside, ignored);
  rename_or_throw(path(step), aside);
  return aside;
}

}  // namespace furlong
