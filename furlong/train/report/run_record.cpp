#include "furlong/train/report/run_record.h"

#include <cmath>
#include <limits>
#include <string_view>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/json.h"

namespace furlong::report {
namespace {

namespace fs = std::filesystem;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kMaxListLength = 1 << 20;  // longer than any real list of layers or experts

/// A JSON object whose values are fetched with their type checked; `where` is "FILE:LINE".
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) throw FormatError(where_ + ": need a JSON object, got " + object.type_name());
  }

  double number(const char* key) const {
    if (!object_.contains(key)) refuse(key, "is missing");
    return as_number(key, object_[key]);
  }
  double number_or(const char* key, double otherwise) const {
    return object_.contains(key) ? as_number(key, object_[key]) : otherwise;
  }
  std::optional<double> maybe_number(const char* key) const {
    return object_.contains(key) ? std::optional<double>(as_number(key, object_[key])) : std::nullopt;
  }
  /// A count: a whole number from 0 up to 2^53, so that arithmetic on it stays exact.
  double count(const char* key) const { return as_count(key, number(key)); }
  double count_or(const char* key, double otherwise) const { return as_count(key, number_or(key, otherwise)); }
  std::string text(const char* key) const {
    if (!object_.contains(key)) refuse(key, "is missing");
    return text_or(key, "");
  }
  std::string text_or(const char* key, const char* otherwise) const {
    if (!object_.contains(key)) return otherwise;
    if (!object_[key].is_string()) refuse(key, std::string("must be a string, got ") + object_[key].type_name());
    return object_[key].get<std::string>();
  }
  std::vector<double> list(const char* key) const {
    return object_.contains(key) ? as_list(key, object_[key]) : std::vector<double>();
  }
  std::vector<std::vector<double>> lists(const char* key) const {
    std::vector<std::vector<double>> all;
    if (!object_.contains(key) || object_[key].is_null()) return all;
    check_array(key, object_[key]);
    for (const Json& item : object_[key]) all.push_back(as_list(key, item));
    return all;
  }
  std::optional<PositionLoss> position_loss(const char* key) const {
    if (!object_.contains(key) || object_[key].is_null()) return std::nullopt;
    const Fields inner(object_[key], where_ + ": " + key);
    PositionLoss value{inner.list("first"), inner.list("loss"), inner.list("targets")};
    if (value.first.size() != value.loss.size() || value.first.size() != value.targets.size()) {
      refuse(key, "has lists of different lengths");
    }
    return value;
  }
  [[noreturn]] void refuse(const char* key, const std::string& why) const {
    throw FormatError(where_ + ": " + key + " " + why);
  }

 private:
  double as_number(const char* key, const Json& value) const {
    if (value.is_null()) return kNaN;
    if (!value.is_number()) refuse(key, std::string("must be a number, got ") + value.type_name());
    return value.get<double>();
  }
  double as_count(const char* key, double value) const {
    if (!(value >= 0 && value <= 0x1p53 && value == std::floor(value))) refuse(key, "must be a whole number from 0");
    return value;
  }
  void check_array(const char* key, const Json& value) const {
    if (!value.is_array()) refuse(key, std::string("must be an array, got ") + value.type_name());
    if (value.size() > kMaxListLength) refuse(key, "is an array of absurd length");
  }
  std::vector<double> as_list(const char* key, const Json& value) const {
    std::vector<double> list;
    if (value.is_null()) return list;
    check_array(key, value);
    list.reserve(value.size());
    for (const Json& item : value) list.push_back(as_number(key, item));
    return list;
  }

  const Json& object_;
  std::string where_;
};

/// Calls read(fields) for each line of a JSON-lines file.
template <typename Read>
void read_lines(const fs::path& path, const Read& read) {
  const std::string content = read_file(path);
  std::string_view rest = content;
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t end = rest.find('\n');
    const std::string where = path.string() + ":" + std::to_string(number);
    if (end == std::string_view::npos) throw FormatError(where + ": cut short, the line has no end");
    const Json value = parse_json(rest.substr(0, end), where);
    read(Fields(value, where));
    rest.remove_prefix(end + 1);
  }
}

StepRecord read_step(const Fields& fields) {
  StepRecord record;
  record.step = static_cast<int64_t>(fields.count("step"));
  record.stage = fields.text("stage");
  record.stage_index = static_cast<int64_t>(fields.count_or("stage_index", 0));
  record.context = static_cast<int64_t>(fields.count_or("context", 0));
  record.tokens = fields.count("tokens");
  record.targets = fields.count_or("targets", 0);
  record.loss = fields.number("loss");
  record.grad_norm = fields.number_or("grad_norm", kNaN);
  record.verdict = fields.text_or("verdict", "ok");
  record.reason = fields.text_or("reason", "");
  record.tokens_per_s = fields.number_or("tokens_per_s", kNaN);
  record.seconds = fields.number_or("seconds", kNaN);
  record.peak_rss_bytes = fields.number_or("peak_rss_bytes", kNaN);
  record.max_vio = fields.number_or("max_vio", kNaN);
  record.max_vio_mean = fields.number_or("max_vio_mean", kNaN);
  record.bias_range = fields.list("bias_range");
  record.decay_saturation = fields.list("decay_saturation");
  record.load = fields.lists("load");
  record.attention_depth = fields.lists("attention_depth_weight");
  record.mlp_depth = fields.lists("mlp_depth_weight");
  record.output_depth = fields.list("output_depth_weight");
  record.position_loss = fields.position_loss("position_loss");
  return record;
}

std::vector<StepRecord> read_metrics(const fs::path& path) {
  std::vector<StepRecord> steps;
  read_lines(path, [&](const Fields& fields) {
    StepRecord record = read_step(fields);
    if (!steps.empty()) {
      const StepRecord& last = steps.back();
      if (record.step <= last.step) fields.refuse("step", "does not follow the line before");
      if (record.tokens < last.tokens) fields.refuse("tokens", "is less than on the line before");
      if (record.stage_index < last.stage_index) fields.refuse("stage_index", "is less than on the line before");
    }
    steps.push_back(std::move(record));
  });
  return steps;
}

/// The model of a resolved config: a table of the published form or of Furlong's, or the path of a file.
ModelConfig read_model(const Json& model, const fs::path& path) {
  const std::string where = path.string() + ": model";
  if (model.is_string()) {
    const fs::path named = model.get<std::string>();
    return ModelConfig::load(named.is_absolute() ? named : path.parent_path() / named);
  }
  if (model.is_object() && model.contains("model_type")) return ModelConfig::from_hugging_face(model, where);
  return ModelConfig::from_document(ConfigDocument::from_json(model, where));
}

void read_config_file(const fs::path& path, RunRecord& run) {
  const ConfigDocument document = ConfigDocument::from_file(path);
  const Json& values = document.values();
  if (values.contains("model")) run.model = read_model(values["model"], path);
  if (values.contains("clip") && values["clip"].is_number()) run.clip = values["clip"].get<double>();
}

}  // namespace

RunRecord read_run(const fs::path& folder) {
  if (!fs::is_directory(folder)) throw IoError(folder.string() + ": not a folder");
  RunRecord run;
  const fs::path absolute = fs::absolute(folder).lexically_normal();
  run.name = absolute.has_filename() ? absolute.filename().string() : absolute.parent_path().filename().string();
  bool found = false;
  const auto with = [&](const char* file, const auto& read) {
    const fs::path path = folder / file;
    if (!fs::exists(path)) return;
    found = true;
    read(path);
  };
  with("config.toml", [&](const fs::path& path) { read_config_file(path, run); });
  with("metrics.jsonl", [&](const fs::path& path) { run.steps = read_metrics(path); });
  with("eval.json", [&](const fs::path& path) {
    const Json value = read_json(path);
    const Fields fields(value, path.string());
    run.eval = EvalRecord{fields.number("bits_per_byte"), fields.maybe_number("nats_per_token"),
                          fields.maybe_number("bytes"), fields.position_loss("position_loss")};
  });
  with("baselines.json", [&](const fs::path& path) {
    const Json value = read_json(path);
    const Fields fields(value, path.string());
    run.baselines =
        Baselines{fields.count("bytes"), fields.number("gzip_bits_per_byte"), fields.number("xz_bits_per_byte")};
  });
  with("samples.jsonl", [&](const fs::path& path) {
    read_lines(path, [&](const Fields& fields) {
      run.samples.push_back({fields.text("prompt"), fields.text("text"), fields.maybe_number("temperature")});
    });
  });
  if (!found) {
    throw IoError(folder.string() +
                  ": no run to report on (none of config.toml, metrics.jsonl, eval.json, "
                  "baselines.json, samples.jsonl)");
  }
  return run;
}

}  // namespace furlong::report
