#pragma once

// Plain structs as configuration. A struct lists its members once, in
//
//   template <typename Visitor> void fields(Visitor& visit) {
//     visit("hidden_size", hidden_size, {.doc = "width of the residual stream", .min = 1, .max = 65536});
//   }
//
// and the visitors below parse, check, print and document it. Unknown keys, wrong types and values out of range are
// ConfigErrors that name the key and the file. Member types: bool, int64_t, double, std::string, std::optional of
// those, std::vector of int64_t, double or std::string, a nested struct with fields(), and a std::vector of such
// structs (an array of tables).

#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/json.h"

namespace furlong {

struct FieldRule {
  std::string doc = {};
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  std::vector<std::string> one_of = {};  // strings: the values allowed
  bool required = false;
};

/// A parsed TOML document (kept as JSON values with the file's name), with `--set` overrides applied.
class ConfigDocument {
 public:
  static ConfigDocument from_file(const std::filesystem::path& path);
  static ConfigDocument from_text(const std::string& text, const std::string& name);
  static ConfigDocument from_json(Json values, const std::string& name);

  /// "a.b.c=value": value is read as TOML (42, 1e-3, true, [1, 2]), else taken as a string. "stages.0.steps=10" reaches
  /// into arrays of tables. UsageError when it is not of this form or passes through something that is no table.
  void set(const std::string& assignment);

  const Json& values() const { return values_; }
  Json& values() { return values_; }
  const std::string& name() const { return name_; }

 private:
  Json values_;
  std::string name_;
};

struct AnyVisitor;  // only named, to ask whether a type has fields()
template <typename T>
concept HasFields = requires { &T::template fields<AnyVisitor>; };

/// Reads one table into one struct. finish() refuses the keys that no field asked for.
class ConfigReader {
 public:
  ConfigReader(const Json& table, std::string where, std::string prefix = "");

  template <typename T>
  void operator()(const char* key, T& member, const FieldRule& rule = {}) {
    const Json* value = take(key, rule);
    if (value != nullptr) read(key, *value, member, rule);
  }
  void finish() const;

 private:
  const Json* take(const char* key, const FieldRule& rule);
  [[noreturn]] void refuse(const std::string& key, const std::string& why) const;
  void check_range(const char* key, double value, const FieldRule& rule) const;

  void read(const char* key, const Json& value, bool& member, const FieldRule& rule);
  void read(const char* key, const Json& value, int64_t& member, const FieldRule& rule);
  void read(const char* key, const Json& value, double& member, const FieldRule& rule);
  void read(const char* key, const Json& value, std::string& member, const FieldRule& rule);

  template <typename T>
  void read(const char* key, const Json& value, std::optional<T>& member, const FieldRule& rule) {
    T inner{};
    read(key, value, inner, rule);
    member = std::move(inner);
  }
  template <typename T>
  void read(const char* key, const Json& value, std::vector<T>& member, const FieldRule& rule) {
    if (!value.is_array()) refuse(key, "must be an array");
    member.clear();
    for (size_t i = 0; i < value.size(); ++i) {
      const std::string item = std::string(key) + "." + std::to_string(i);
      read(item.c_str(), value[i], member.emplace_back(), rule);
    }
  }
  template <HasFields T>
  void read(const char* key, const Json& value, T& member, const FieldRule&) {
    if (!value.is_object()) refuse(key, "must be a table");
    ConfigReader inner(value, where_, prefix_ + key + ".");
    member.fields(inner);
    inner.finish();
  }

  const Json& table_;
  std::string where_;
  std::string prefix_;
  std::vector<std::string> known_;
};

/// Fills a struct from a document: defaults where a key is absent, ConfigError on anything unknown or out of range.
template <typename T>
T read_config(const ConfigDocument& document) {
  T config;
  ConfigReader reader(document.values(), document.name());
  config.fields(reader);
  reader.finish();
  return config;
}

/// Struct to JSON, in the order of fields(); unset optionals are left out.
class ConfigPrinter {
 public:
  template <typename T>
  void operator()(const char* key, T& member, const FieldRule& = {}) {
    if (auto value = print(member); !value.is_null()) values[key] = std::move(value);
  }
  OrderedJson values = OrderedJson::object();

 private:
  template <typename T>
  static OrderedJson print(T& member) {
    if constexpr (HasFields<T>) {
      ConfigPrinter inner;
      member.fields(inner);
      return inner.values;
    } else {
      return member;
    }
  }
  template <typename T>
  static OrderedJson print(std::optional<T>& member) {
    return member ? print(*member) : OrderedJson();
  }
  template <typename T>
  static OrderedJson print(std::vector<T>& member) {
    OrderedJson list = OrderedJson::array();
    for (T& item : member) list.push_back(print(item));
    return list;
  }
};

template <typename T>
OrderedJson config_to_json(T config) {
  ConfigPrinter printer;
  config.fields(printer);
  return printer.values;
}

/// JSON (as config_to_json gives it) as TOML text.
std::string json_to_toml(const OrderedJson& values);

/// The candidate closest to `word` in edit distance, if it is close enough to be a likely misspelling; else "".
std::string closest_word(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace furlong
