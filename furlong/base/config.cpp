#include "furlong/base/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <toml++/toml.h>
#include <algorithm>
#include <cmath>
#include <sstream>

#include "furlong/base/file.h"

namespace furlong {

namespace {

Json to_json(const toml::node& node, const std::string& where) {
  if (const auto* table = node.as_table()) {
    Json object = Json::object();
    for (const auto& [key, value] : *table) object[std::string(key.str())] = to_json(value, where);
    return object;
  }
  if (const auto* array = node.as_array()) {
    Json list = Json::array();
    for (const auto& value : *array) list.push_back(to_json(value, where));
    return list;
  }
  if (const auto* value = node.as_string()) return value->get();
  if (const auto* value = node.as_integer()) return value->get();
  if (const auto* value = node.as_floating_point()) return value->get();
  if (const auto* value = node.as_boolean()) return value->get();
  throw ConfigError(where + ": dates and times have no use here");
}

Json parse_toml(const std::string& text, const std::string& name) {
  try {
    return to_json(toml::parse(text), name);
  } catch (const toml::parse_error& error) {
    throw ConfigError(fmt::format("{}: not valid TOML at line {}: {}", name, error.source().begin.line,
                                  std::string(error.description())));
  }
}

std::string type_name(const Json& value) {
  if (value.is_object()) return "a table";
  if (value.is_array()) return "an array";
  if (value.is_string()) return "the string '" + value.get<std::string>() + "'";
  return value.dump();
}

}  // namespace

ConfigDocument ConfigDocument::from_file(const std::filesystem::path& path) {
  return from_text(read_file(path), path.string());
}

ConfigDocument ConfigDocument::from_text(const std::string& text, const std::string& name) {
  return from_json(parse_toml(text, name), name);
}

ConfigDocument ConfigDocument::from_json(Json values, const std::string& name) {
  ConfigDocument document;
  document.values_ = std::move(values);
  document.name_ = name;
  return document;
}

void ConfigDocument::set(const std::string& assignment) {
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0) {
    throw UsageError("--set " + assignment + ": needs the form key=value, for example --set schedule.peak_lr=1e-3");
  }
  const std::string path = assignment.substr(0, equals);
  const std::string text = assignment.substr(equals + 1);
  Json value;
  try {
    value = parse_toml("value = " + text, "--set")["value"];
  } catch (const ConfigError&) {
    value = text;
  }
  Json* node = &values_;
  std::stringstream parts(path);
  std::string part;
  while (std::getline(parts, part, '.')) {
    if (node->is_array()) {
      const bool is_index = !part.empty() && part.size() < 7 && std::all_of(part.begin(), part.end(), ::isdigit);
      if (!is_index || std::stoul(part) >= node->size()) {
        throw UsageError(
            fmt::format("--set {}: '{}' is no index of the {} entries there", assignment, part, node->size()));
      }
      node = &(*node)[std::stoul(part)];
    } else if (node->is_object() || node->is_null()) {
      node = &(*node)[part];
    } else {
      throw UsageError(fmt::format("--set {}: '{}' lies below a value that is no table", assignment, part));
    }
  }
  *node = std::move(value);
}

ConfigReader::ConfigReader(const Json& table, std::string where, std::string prefix)
    : table_(table), where_(std::move(where)), prefix_(std::move(prefix)) {}

const Json* ConfigReader::take(const char* key, const FieldRule& rule) {
  known_.emplace_back(key);
  const auto found = table_.find(key);
  if (found != table_.end() && !found->is_null()) return &*found;
  if (rule.required) throw ConfigError(fmt::format("{}: missing key '{}{}' ({})", where_, prefix_, key, rule.doc));
  return nullptr;
}

void ConfigReader::refuse(const std::string& key, const std::string& why) const {
  throw ConfigError(fmt::format("{}: key '{}{}' {}", where_, prefix_, key, why));
}

void ConfigReader::check_range(const char* key, double value, const FieldRule& rule) const {
  if (std::isfinite(value) && value >= rule.min && value <= rule.max) return;
  refuse(key, fmt::format("is {}, must be in [{}, {}]", value, rule.min, rule.max));
}

void ConfigReader::finish() const {
  for (const auto& [key, value] : table_.items()) {
    if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
    const std::string close = closest_word(key, known_);
    throw ConfigError(fmt::format("{}: unknown key '{}{}'{}", where_, prefix_, key,
                                  close.empty() ? "" : fmt::format(" (did you mean '{}'?)", close)));
  }
}

void ConfigReader::read(const char* key, const Json& value, bool& member, const FieldRule&) {
  if (!value.is_boolean()) refuse(key, "must be true or false, got " + type_name(value));
  member = value.get<bool>();
}

void ConfigReader::read(const char* key, const Json& value, int64_t& member, const FieldRule& rule) {
  if (!value.is_number_integer()) refuse(key, "must be an integer, got " + type_name(value));
  check_range(key, value.get<double>(), rule);
  member = value.get<int64_t>();
}

void ConfigReader::read(const char* key, const Json& value, double& member, const FieldRule& rule) {
  if (!value.is_number()) refuse(key, "must be a number, got " + type_name(value));
  check_range(key, value.get<double>(), rule);
  member = value.get<double>();
}

void ConfigReader::read(const char* key, const Json& value, std::string& member, const FieldRule& rule) {
  if (!value.is_string()) refuse(key, "must be a string, got " + type_name(value));
  member = value.get<std::string>();
  if (!rule.one_of.empty() && std::find(rule.one_of.begin(), rule.one_of.end(), member) == rule.one_of.end()) {
    refuse(key, fmt::format("is '{}', must be one of: {}", member, fmt::join(rule.one_of, ", ")));
  }
}

namespace {

std::string toml_scalar(const OrderedJson& value) {
  if (value.is_array()) {
    std::vector<std::string> items;
    for (const auto& item : value) items.push_back(toml_scalar(item));
    return fmt::format("[{}]", fmt::join(items, ", "));
  }
  if (value.is_number_float()) {
    std::string text = fmt::format("{}", value.get<double>());
    if (text.find_first_of(".en") == std::string::npos) text += ".0";
    return text;
  }
  return value.dump();
}

bool is_table_array(const OrderedJson& value) {
  return value.is_array() && !value.empty() && value[0].is_object();
}

void print_table(const OrderedJson& table, const std::string& prefix, std::string& text) {
  for (const auto& [key, value] : table.items()) {
    if (!value.is_object() && !is_table_array(value)) text += fmt::format("{} = {}\n", key, toml_scalar(value));
  }
  for (const auto& [key, value] : table.items()) {
    const std::string path = prefix.empty() ? key : prefix + "." + key;
    if (value.is_object()) {
      text += fmt::format("\n[{}]\n", path);
      print_table(value, path, text);
    } else if (is_table_array(value)) {
      for (const auto& item : value) {
        text += fmt::format("\n[[{}]]\n", path);
        print_table(item, path, text);
      }
    }
  }
}

}  // namespace

std::string json_to_toml(const OrderedJson& values) {
  std::string text;
  print_table(values, "", text);
  return text;
}

std::string closest_word(const std::string& word, const std::vector<std::string>& candidates) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    std::vector<size_t> row(candidate.size() + 1);
    for (size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= word.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i;
      for (size_t j = 1; j <= candidate.size(); ++j) {
        const size_t substituted = diagonal + (word[i - 1] != candidate[j - 1] ? 1 : 0);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = candidate;
    }
  }
  return best;
}

}  // namespace furlong
