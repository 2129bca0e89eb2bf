#include "furlong/train/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <set>

namespace furlong {

namespace fs = std::filesystem;

namespace {

bool assigns_model(const std::string& assignment) {
  return assignment.starts_with("model=");
}

/// Puts the file named by `model` in its place, so that --set model.KEY reaches into it. A config.json of the
/// published form stays a path: it has other keys.
void inline_model(ConfigDocument& document, const fs::path& folder) {
  Json& model = document.values()["model"];
  if (!model.is_string()) return;
  const fs::path path = folder / fs::path(model.get<std::string>());
  if (path.extension() == ".toml") {
    model = ConfigDocument::from_file(path).values();
  } else {
    model = path.string();
  }
}

ModelConfig take_model(ConfigDocument& document) {
  Json& values = document.values();
  const Json model = values["model"];
  values.erase("model");
  if (model.is_string()) return ModelConfig::load(model.get<std::string>());
  if (model.is_object())
    return ModelConfig::from_document(ConfigDocument::from_json(model, document.name() + ": model"));
  throw ConfigError(document.name() + ": key 'model' must be the path of a model config or a table [model]");
}

void check_sources(const std::vector<SourceConfig>& sources, const std::string& where, const std::string& key) {
  if (sources.empty()) throw ConfigError(fmt::format("{}: key '{}' names no source", where, key));
  double sum = 0.0;
  for (const SourceConfig& source : sources) sum += source.weight;
  if (!(sum > 0.0)) throw ConfigError(fmt::format("{}: key '{}': all weights are zero", where, key));
}

}  // namespace

std::vector<SourceConfig> TrainConfig::sources_of(int64_t stage) const {
  const StageConfig& config = stages[stage];
  std::vector<SourceConfig> sources = config.sources.empty() ? data.sources : config.sources;
  for (size_t i = 0; i < config.weights.size(); ++i) sources[i].weight = config.weights[i];
  return sources;
}

TrainConfig TrainConfig::load(const fs::path& path, const std::vector<std::string>& assignments) {
  return from_document(ConfigDocument::from_file(path), path.parent_path(), assignments);
}

TrainConfig TrainConfig::from_document(ConfigDocument document, const fs::path& folder,
                                       const std::vector<std::string>& assignments) {
  for (const std::string& assignment : assignments) {
    if (assigns_model(assignment)) document.set(assignment);
  }
  inline_model(document, folder);
  for (const std::string& assignment : assignments) {
    if (!assigns_model(assignment)) document.set(assignment);
  }
  const OrderedJson model_values = document.values()["model"];
  const ModelConfig model = take_model(document);
  TrainConfig config = read_config<TrainConfig>(document);
  config.model = model;
  config.model_values = model_values;
  config.validate(document.name());
  return config;
}

void TrainConfig::validate(const std::string& where) const {
  if (stages.empty()) throw ConfigError(where + ": key 'stages' has no entry");
  const bool numbered = device.starts_with("cuda:") && device.size() > 5 && device.size() < 8 &&
                        std::all_of(device.begin() + 5, device.end(), ::isdigit);
  if (device != "cpu" && device != "cuda" && !numbered) {
    throw ConfigError(fmt::format("{}: key 'device' is '{}', must be cpu, cuda or cuda:N", where, device));
  }
  for (size_t i = 0; i < stages.size(); ++i) {
    const StageConfig& stage = stages[i];
    const std::string key = fmt::format("stages.{}", i);
    if (stage.tokens.has_value() == stage.steps.has_value()) {
      throw ConfigError(fmt::format("{}: {} ('{}') needs tokens or steps, one of the two", where, key, stage.name));
    }
    if (stage.micro_rows > 0 && stage.rows % stage.micro_rows != 0) {
      throw ConfigError(fmt::format("{}: key '{}.micro_rows' is {}, must divide rows = {}", where, key,
                                    stage.micro_rows, stage.rows));
    }
    if (stage.context > model.max_context) {
      throw ConfigError(fmt::format("{}: key '{}.context' is {}, above the model's max_context {}", where, key,
                                    stage.context, model.max_context));
    }
    const size_t sources = stage.sources.empty() ? data.sources.size() : stage.sources.size();
    if (!stage.weights.empty() && stage.weights.size() != sources) {
      throw ConfigError(
          fmt::format("{}: key '{}.weights' has {} entries for {} sources", where, key, stage.weights.size(), sources));
    }
    check_sources(sources_of(static_cast<int64_t>(i)), where,
                  stage.sources.empty() ? "data.sources" : key + ".sources");
  }
}

OrderedJson TrainConfig::resolved() const {
  OrderedJson values = OrderedJson::object();
  values["model"] = model.to_hugging_face();
  const OrderedJson rest = config_to_json(*this);
  for (const auto& [key, value] : rest.items()) values[key] = value;
  return values;
}

std::string TrainConfig::to_toml() const {
  OrderedJson values = config_to_json(*this);
  values["model"] = model_values;
  return json_to_toml(values);
}

namespace {

bool free_to_change(const std::string& key) {
  static const std::set<std::string> top = {"checkpoint", "log", "threads", "device"};
  return top.contains(key) || key.ends_with(".path");
}

std::string text(const OrderedJson* value) {
  return value == nullptr ? "absent" : value->dump();
}

std::string difference(const std::string& key, const OrderedJson* saved, const OrderedJson* now) {
  if (free_to_change(key)) return "";
  if (saved != nullptr && now != nullptr && saved->is_structured() && saved->type() == now->type()) {
    std::set<std::string> names;
    for (const auto& item : saved->items()) names.insert(item.key());
    for (const auto& item : now->items()) names.insert(item.key());
    const auto child = [](const OrderedJson& parent, const std::string& name) -> const OrderedJson* {
      if (parent.is_array()) {
        const size_t index = std::stoul(name);
        return index < parent.size() ? &parent[index] : nullptr;
      }
      const auto found = parent.find(name);
      return found == parent.end() ? nullptr : &*found;
    };
    for (const std::string& name : names) {
      const std::string path = key.empty() ? name : key + "." + name;
      if (auto found = difference(path, child(*saved, name), child(*now, name)); !found.empty()) return found;
    }
    return "";
  }
  if (saved != nullptr && now != nullptr && *saved == *now) return "";
  return fmt::format("{}: {} in the checkpoint, {} now", key, text(saved), text(now));
}

}  // namespace

std::string first_difference(const OrderedJson& saved, const OrderedJson& now) {
  return difference("", &saved, &now);
}

}  // namespace furlong
