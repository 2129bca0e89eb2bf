#include "furlong/tokenizer/exact_json.h"

#include <algorithm>
#include <charconv>
#include <unordered_map>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/json_fault.h"

namespace furlong {

namespace {

/// Builds the value from the parser's events. An object finds its keys by a table: ordered_json alone would compare
/// every key with all before it.
class Builder : public nlohmann::json_sax<OrderedJson> {
 public:
  Builder(OrderedJson& root, const std::string& where) : root_(root), where_(where) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& digits) override {
    if (digits.find_first_of(".eE") != std::string::npos) return add(value);
    return add(OrderedJson::binary({digits.begin(), digits.end()}));
  }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t& value) override { return add(std::move(value)); }

  bool start_object(size_t) override { return open(OrderedJson::object()); }
  bool start_array(size_t) override { return open(OrderedJson::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    Level& level = levels_.back();
    auto& members = level.value->get_ref<OrderedJson::object_t&>();
    const auto [found, is_new] = level.keys.try_emplace(name, members.size());
    if (is_new) members.push_back({name, nullptr});
    level.slot = found->second;  // of two equal keys the last value counts, at the place of the first
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    throw FormatError(where_ + ": not valid JSON: " + json_fault(error));
  }

 private:
  struct Level {
    OrderedJson* value;
    std::unordered_map<std::string, size_t> keys;
    size_t slot = 0;
  };

  OrderedJson* place(OrderedJson&& value) {
    if (levels_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Level& level = levels_.back();
    if (level.value->is_array()) {
      level.value->push_back(std::move(value));
      return &level.value->back();
    }
    OrderedJson& member = (level.value->get_ref<OrderedJson::object_t&>().begin() + level.slot)->second;
    member = std::move(value);
    return &member;
  }
  bool add(OrderedJson&& value) { return place(std::move(value)), true; }
  bool open(OrderedJson&& value) {
    if (levels_.size() == kMaxJsonDepth) {
      throw FormatError(where_ + ": nested deeper than " + std::to_string(kMaxJsonDepth) + " levels");
    }
    levels_.push_back({place(std::move(value)), {}, 0});
    return true;
  }
  bool close() { return levels_.pop_back(), true; }

  OrderedJson& root_;
  const std::string& where_;
  std::vector<Level> levels_;  // a parent is not touched while a child of it is open
};

/// Python's repr of a float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 up.
std::string float_text(double value) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
  const std::string_view text(buffer, end - buffer);
  const size_t mark = text.find('e');
  const int exponent = std::stoi(std::string(text.substr(mark + 1)));
  std::string result(text.substr(0, text.front() == '-' ? 1 : 0));
  std::string digits(text.substr(result.size(), mark - result.size()));
  if (exponent < -4 || exponent >= 16) {
    const std::string power = std::to_string(std::abs(exponent));
    return result + digits + (exponent < 0 ? "e-" : "e+") + (power.size() < 2 ? "0" : "") + power;
  }
  digits.erase(std::remove(digits.begin(), digits.end(), '.'), digits.end());
  if (exponent < 0) return result + "0." + std::string(-exponent - 1, '0') + digits;
  const size_t whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() < whole) digits.append(whole - digits.size(), '0');
  return result + digits.substr(0, whole) + "." + (digits.size() > whole ? digits.substr(whole) : "0");
}

class Writer {
 public:
  explicit Writer(JsonStyle style) : style_(style) {}

  void write(const OrderedJson& value) {
    if (value.is_object()) {
      write_object(value);
    } else if (value.is_array()) {
      text += '[';
      for (size_t i = 0; i < value.size(); ++i) {
        if (i > 0) text += comma();
        write(value[i]);
      }
      text += ']';
    } else if (value.is_binary()) {
      text.append(value.get_binary().begin(), value.get_binary().end());
    } else {
      text += value.is_number_float() ? float_text(value.get<double>()) : value.dump();
    }
  }

  std::string text;

 private:
  std::string_view comma() const { return style_ == JsonStyle::kSpaced ? ", " : ","; }

  void write_object(const OrderedJson& value) {
    std::vector<std::pair<const std::string*, const OrderedJson*>> members;
    for (const auto& [key, member] : value.get_ref<const OrderedJson::object_t&>()) members.push_back({&key, &member});
    if (style_ == JsonStyle::kCompactSorted) {
      std::sort(members.begin(), members.end(), [](const auto& a, const auto& b) { return *a.first < *b.first; });
    }
    text += '{';
    for (size_t i = 0; i < members.size(); ++i) {
      if (i > 0) text += comma();
      text += OrderedJson(*members[i].first).dump();
      text += style_ == JsonStyle::kSpaced ? ": " : ":";
      write(*members[i].second);
    }
    text += '}';
  }

  JsonStyle style_;
};

}  // namespace

OrderedJson parse_exact_json(std::string_view text, const std::string& where) {
  OrderedJson value;
  Builder builder(value, where);
  OrderedJson::sax_parse(text.begin(), text.end(), &builder);
  return value;
}

std::string exact_json_text(const OrderedJson& value, JsonStyle style) {
  Writer writer(style);
  writer.write(value);
  return std::move(writer.text);
}

}  // namespace furlong
