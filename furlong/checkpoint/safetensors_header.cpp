#include "furlong/checkpoint/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/json_fault.h"

namespace furlong {

namespace {

using Json = nlohmann::json;

constexpr size_t kMaxDimensions = 64;  // what the tensor library's iterators take

/// Level 1: the file's object; level 2: one tensor's object, or the metadata; level 3: a list of a tensor.
class HeaderEvents : public nlohmann::json_sax<Json> {
 public:
  HeaderEvents(SafetensorsHeader& header, const std::string& file) : header_(header), file_(file) {}

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { return unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return unexpected("a number that is not a 64-bit integer");
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (level_ != 3) return unexpected("a number");
    std::vector<uint64_t>& list = field_ == kShape ? shape_ : offsets_;
    if (list.size() >= (field_ == kShape ? kMaxDimensions : 2)) fail(field_name() + " is too long");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) fail(field_name() + " is out of range");
    list.push_back(value);
    return true;
  }

  bool string(string_t& value) override {
    if (level_ == 2 && in_metadata_) {
      if (!header_.metadata.emplace(field_key_, value).second) fail("key '" + field_key_ + "' stands twice");
      return true;
    }
    if (level_ != 2 || field_ != kDtype) return unexpected("a string");
    dtype_ = value;
    return true;
  }

  bool start_object(size_t) override {
    if (level_ >= 2) return unexpected("an object");
    ++level_;
    if (level_ == 2) {
      fields_seen_ = 0;
      dtype_.clear();
      shape_.clear();
      offsets_.clear();
    }
    return true;
  }

  bool key(string_t& value) override {
    if (level_ == 1) {
      name_ = value;
      in_metadata_ = value == "__metadata__";
      if (in_metadata_ ? std::exchange(metadata_seen_, true) : header_.tensors.count(value) > 0) fail("stands twice");
      return true;
    }
    field_key_ = value;
    if (in_metadata_) return true;
    field_ = value == "dtype" ? kDtype : value == "shape" ? kShape : value == "data_offsets" ? kOffsets : kNone;
    if (field_ == kNone) fail("unknown key '" + value + "'");
    if ((fields_seen_ & field_) != 0) fail("key '" + value + "' stands twice");
    fields_seen_ |= field_;
    return true;
  }

  bool end_object() override {
    if (level_ == 2 && !in_metadata_) add_tensor();
    --level_;
    return true;
  }

  bool start_array(size_t) override {
    if (level_ != 2 || in_metadata_ || field_ == kDtype) return unexpected("a list");
    ++level_;
    return true;
  }

  bool end_array() override {
    --level_;
    return true;
  }

  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    throw FormatError(file_ + ": the header is not valid JSON: " + json_fault(error));
  }

 private:
  enum Field : unsigned { kNone = 0, kDtype = 1, kShape = 2, kOffsets = 4 };

  [[noreturn]] void fail(const std::string& what) const {
    const std::string thing = in_metadata_ ? "metadata" : "tensor '" + name_ + "'";
    throw FormatError(file_ + ": " + (level_ == 0 ? "header" : thing) + ": " + what);
  }

  std::string field_name() const { return field_ == kShape ? "shape" : "data_offsets"; }

  bool unexpected(const std::string& what) const {
    if (level_ == 0) fail("got " + what + ", need an object");
    if (level_ == 1) fail("got " + what + ", need an object");
    if (in_metadata_) fail("key '" + field_key_ + "': got " + what + ", need a string");
    if (field_ == kDtype) fail("dtype: got " + what + ", need a string");
    fail(field_name() + ": got " + what + ", need a list of non-negative integers");
  }

  void add_tensor() {
    if (fields_seen_ != (kDtype | kShape | kOffsets)) fail("needs dtype, shape and data_offsets");
    const int64_t dtype_bytes = safetensors_dtype_bytes(dtype_);
    if (dtype_bytes == 0) fail("unknown dtype '" + dtype_ + "'");
    if (offsets_.size() != 2) fail("data_offsets must hold two numbers");
    if (offsets_[0] > offsets_[1]) fail("data_offsets end before they begin");
    TensorEntry entry;
    entry.dtype = std::move(dtype_);
    entry.shape.assign(shape_.begin(), shape_.end());
    entry.offset = offsets_[0];
    if (!safetensors_bytes(entry.shape, dtype_bytes, &entry.bytes)) fail("shape x dtype overflows");
    if (entry.bytes != offsets_[1] - offsets_[0]) {
      fail("shape and dtype need " + std::to_string(entry.bytes) + " bytes, data_offsets give " +
           std::to_string(offsets_[1] - offsets_[0]));
    }
    header_.tensors.emplace(name_, std::move(entry));
  }

  SafetensorsHeader& header_;
  const std::string& file_;
  int level_ = 0;
  std::string name_;
  std::string field_key_;
  bool in_metadata_ = false;
  bool metadata_seen_ = false;
  Field field_ = kNone;
  unsigned fields_seen_ = 0;
  std::string dtype_;
  std::vector<uint64_t> shape_;
  std::vector<uint64_t> offsets_;
};

/// Tensors in the order of their data must follow one another from the first byte to the last.
void check_coverage(const SafetensorsHeader& header, uint64_t data_bytes, const std::string& file) {
  std::vector<const std::pair<const std::string, TensorEntry>*> by_offset;
  by_offset.reserve(header.tensors.size());
  for (const auto& named : header.tensors) by_offset.push_back(&named);
  std::stable_sort(by_offset.begin(), by_offset.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.offset, a->second.bytes) < std::pair(b->second.offset, b->second.bytes);
  });
  uint64_t end = 0;
  for (const auto* named : by_offset) {
    const TensorEntry& entry = named->second;
    const std::string where = file + ": tensor '" + named->first + "': ";
    if (entry.offset > data_bytes || entry.bytes > data_bytes - entry.offset) {
      throw FormatError(where + "data end at byte " + std::to_string(entry.offset + entry.bytes) +
                        ", the file's data at " + std::to_string(data_bytes) + " (truncated?)");
    }
    if (entry.offset < end) throw FormatError(where + "its data overlap another tensor's");
    if (entry.offset > end) throw FormatError(where + "unused bytes stand before its data");
    end = entry.offset + entry.bytes;
  }
  if (end != data_bytes) {
    throw FormatError(file + ": " + std::to_string(data_bytes - end) + " bytes at the end belong to no tensor");
  }
}

}  // namespace

bool safetensors_bytes(const std::vector<int64_t>& shape, int64_t dtype_bytes, uint64_t* bytes) {
  int64_t product = dtype_bytes;
  bool empty = false;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product)) return false;
    empty = empty || size == 0;
  }
  *bytes = empty ? 0 : static_cast<uint64_t>(product);
  return true;
}

SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t data_bytes, const std::string& file) {
  SafetensorsHeader header;
  HeaderEvents events(header, file);
  Json::sax_parse(text, &events);
  check_coverage(header, data_bytes, file);
  return header;
}

}  // namespace furlong
