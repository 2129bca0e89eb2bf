#include "furlong/train/metrics.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/process.h"

namespace furlong {

namespace fs = std::filesystem;

namespace {

OrderedJson list_or_null(const std::vector<double>& values) {
  return values.empty() ? OrderedJson() : OrderedJson(values);
}

OrderedJson number_or_null(const std::optional<double>& value) {
  return value ? OrderedJson(*value) : OrderedJson();
}

OrderedJson counts_or_null(const std::vector<double>& values) {
  if (values.empty()) return OrderedJson();
  OrderedJson list = OrderedJson::array();
  for (const double value : values) list.push_back(static_cast<int64_t>(value));
  return list;
}

/// One entry a layer: per_layer[i] = get(i).
template <typename Get>
OrderedJson per_layer(size_t layers, const Get& get) {
  OrderedJson list = OrderedJson::array();
  for (size_t i = 0; i < layers; ++i) list.push_back(get(i));
  return list;
}

void add_layers(const StepOutcome& outcome, OrderedJson& record) {
  const auto& layers = outcome.statistics.layers();
  const auto load_measure = [&](double (*measure)(const std::vector<double>&)) {
    return per_layer(layers.size(), [&, measure](size_t i) {
      return layers[i].load.empty() ? OrderedJson() : OrderedJson(measure(layers[i].load));
    });
  };
  record["load_cv"] = load_measure(variation_of);
  record["layer_max_vio"] = load_measure(max_violation_of);
  const auto bias = [](const std::vector<std::optional<double>>& values) {
    return per_layer(values.size(), [&](size_t i) { return number_or_null(values[i]); });
  };
  record["bias_range"] = bias(outcome.bias_range);
  record["bin_mass"] = bias(outcome.bin_mass);
  const auto share = [&](std::optional<double> LayerStatistics::*member) {
    return per_layer(layers.size(), [&, member](size_t i) { return number_or_null(layers[i].*member); });
  };
  record["decay_saturation"] = share(&LayerStatistics::decay_saturated);
  record["decay_open"] = share(&LayerStatistics::decay_open);
  record["beta_mean"] = share(&LayerStatistics::beta_mean);
}

void add_detail(const StepOutcome& outcome, OrderedJson& record) {
  const auto& layers = outcome.statistics.layers();
  record["load"] = per_layer(layers.size(), [&](size_t i) { return counts_or_null(layers[i].load); });
  const auto depth = [&](std::vector<double> LayerStatistics::*member) {
    return per_layer(layers.size(), [&, member](size_t i) { return list_or_null(layers[i].*member); });
  };
  record["attention_depth_weight"] = depth(&LayerStatistics::attention_depth_weight);
  record["mlp_depth_weight"] = depth(&LayerStatistics::mlp_depth_weight);
  record["output_depth_weight"] = list_or_null(outcome.statistics.output_depth_weight());
  record["position_loss"] = outcome.position_loss.to_json();
}

}  // namespace

double StepMetrics::max_violation() const {
  double worst = 0.0;
  for (const LayerStatistics& layer : outcome.statistics.layers()) {
    if (!layer.load.empty()) worst = std::max(worst, max_violation_of(layer.load));
  }
  return worst;
}

OrderedJson StepMetrics::to_json() const {
  double sum = 0.0;
  int64_t routers = 0;
  for (const LayerStatistics& layer : outcome.statistics.layers()) {
    if (layer.load.empty()) continue;
    sum += max_violation_of(layer.load);
    ++routers;
  }
  OrderedJson record = {{"step", step},
                        {"stage", stage},
                        {"stage_index", stage_index},
                        {"context", context},
                        {"tokens", tokens_total},
                        {"targets", outcome.targets},
                        {"loss", outcome.loss},  // NaN prints as null
                        {"lr", lr},
                        {"grad_norm", outcome.grad_norm},
                        {"verdict", outcome.verdict.name()}};
  if (!outcome.verdict.reason.empty()) record["reason"] = outcome.verdict.reason;
  record["tokens_per_s"] = static_cast<double>(outcome.tokens) / std::max(seconds, 1e-9);
  record["seconds"] = seconds;
  record["elapsed"] = elapsed;
  record["rss_bytes"] = rss_bytes();
  record["peak_rss_bytes"] = peak_rss_bytes();
  record["max_vio"] = max_violation();
  record["max_vio_mean"] = routers > 0 ? sum / static_cast<double>(routers) : 0.0;
  add_layers(outcome, record);
  if (detail) add_detail(outcome, record);
  return record;
}

namespace {

[[noreturn]] void fail(const std::string& what, const fs::path& path) {
  const int code = errno;
  throw IoError(fmt::format("{}: cannot {}: {}", path.string(), what, std::strerror(code)));
}

}  // namespace

MetricsFile::MetricsFile(fs::path path) : path_(std::move(path)) {
  descriptor_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail("open", path_);
}

MetricsFile::~MetricsFile() {
  close(descriptor_);
}

void MetricsFile::append(const OrderedJson& record) {
  const std::string line = record.dump() + "\n";
  const off_t before = lseek(descriptor_, 0, SEEK_END);
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t written = write(descriptor_, line.data() + done, line.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int code = errno;
      if (ftruncate(descriptor_, before) != 0) errno = code;
      errno = code;
      fail("write", path_);
    }
    done += static_cast<size_t>(written);
  }
}

void MetricsFile::sync() {
  if (fsync(descriptor_) != 0) fail("sync", path_);
}

int64_t MetricsFile::cut(const fs::path& path, int64_t last_step) {
  if (!fs::exists(path)) return 0;
  const std::string content = read_file(path);
  std::string kept;
  int64_t records = 0;
  size_t begin = 0;
  while (begin < content.size()) {
    const size_t end = content.find('\n', begin);
    if (end == std::string::npos) break;  // a torn last line
    const std::string_view line(content.data() + begin, end - begin);
    const Json record = parse_json(line, fmt::format("{}: record {}", path.string(), records + 1));
    const int64_t step = record.is_object() ? record.value("step", int64_t{-1}) : -1;
    if (step > last_step) break;
    if (step != records + 1) {
      throw FormatError(fmt::format("{}: record {} is of step {}", path.string(), records + 1, step));
    }
    kept.append(line).push_back('\n');
    ++records;
    begin = end + 1;
  }
  if (kept.size() != content.size()) write_file_atomic(path, kept);
  return records;
}

}  // namespace furlong
