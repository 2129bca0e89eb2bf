#include "furlong/checkpoint/safetensors.h"

#include <array>
#include <bit>
#include <cstring>
#include <set>
#include <string_view>
#include <utility>

#include "furlong/base/error.h"
#include "furlong/base/json.h"
#include "furlong/checkpoint/safetensors_header.h"

namespace furlong {

static_assert(std::endian::native == std::endian::little, "tensor data are mapped as they stand in the file");

namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own library
constexpr size_t kAlignment = 8;                   // the header is padded with spaces so that data start aligned

constexpr std::array<std::pair<std::string_view, int64_t>, 17> kDtypes = {{
    {"F64", 8},
    {"F32", 4},
    {"F16", 2},
    {"BF16", 2},
    {"I64", 8},
    {"I32", 4},
    {"I16", 2},
    {"I8", 1},
    {"U8", 1},
    {"BOOL", 1},
    {"U16", 2},
    {"U32", 4},
    {"U64", 8},
    {"C64", 8},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
    {"F8_E8M0", 1},
}};

/// Names and bytes of tensors that a file can hold.
std::vector<std::pair<std::string, uint64_t>> check_layout(const std::filesystem::path& path,
                                                           const std::vector<TensorLayout>& tensors) {
  std::set<std::string_view> names;
  std::vector<std::pair<std::string, uint64_t>> result;
  for (const TensorLayout& tensor : tensors) {
    const std::string where = path.string() + ": tensor '" + tensor.name + "': ";
    if (tensor.name == "__metadata__") throw UsageError(where + "the name is reserved");
    if (!names.insert(tensor.name).second) throw UsageError(where + "given twice");
    const int64_t dtype_bytes = safetensors_dtype_bytes(tensor.dtype);
    if (dtype_bytes == 0) throw UsageError(where + "unknown dtype '" + tensor.dtype + "'");
    uint64_t bytes = 0;
    if (!safetensors_bytes(tensor.shape, dtype_bytes, &bytes)) throw UsageError(where + "shape x dtype overflows");
    result.emplace_back(tensor.name, bytes);
  }
  return result;
}

std::string header_text(const std::filesystem::path& path, const std::vector<TensorLayout>& tensors,
                        const std::vector<std::pair<std::string, uint64_t>>& sizes,
                        const std::map<std::string, std::string>& metadata) {
  OrderedJson header = OrderedJson::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t end = offset + sizes[i].second;
    // Names are known to be distinct: appending spares ordered_json's linear look-up.
    header.get_ref<OrderedJson::object_t&>().emplace_back(
        tensors[i].name,
        OrderedJson{{"dtype", tensors[i].dtype}, {"shape", tensors[i].shape}, {"data_offsets", {offset, end}}});
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const OrderedJson::exception&) {
    throw UsageError(path.string() + ": a tensor's name or the metadata is not valid UTF-8");
  }
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  if (text.size() > kMaxHeaderBytes) {
    throw UsageError(path.string() + ": the header would take " + std::to_string(text.size()) +
                     " bytes, the limit is " + std::to_string(kMaxHeaderBytes));
  }
  return text;
}

}  // namespace

int64_t safetensors_dtype_bytes(const std::string& dtype) {
  for (const auto& [name, bytes] : kDtypes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

SafetensorsFile::SafetensorsFile(std::filesystem::path path) : path_(std::move(path)), file_(path_) {
  const std::span<const std::byte> bytes = file_.bytes();
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) {
    throw FormatError(path_.string() + ": " + std::to_string(bytes.size()) +
                      " bytes are too few for a safetensors file");
  }
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  const uint64_t rest = bytes.size() - sizeof(header_bytes);
  if (header_bytes > rest || header_bytes > kMaxHeaderBytes) {
    throw FormatError(path_.string() + ": the header claims " + std::to_string(header_bytes) +
                      " bytes, the file holds " + std::to_string(rest) + " after its length (limit " +
                      std::to_string(kMaxHeaderBytes) + "): truncated, or not a safetensors file");
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + sizeof(header_bytes), header_bytes);
  SafetensorsHeader header = parse_safetensors_header(text, rest - header_bytes, path_.string());
  header_bytes_ = sizeof(header_bytes) + header_bytes;
  for (auto& [name, entry] : header.tensors) entry.offset += header_bytes_;
  tensors_ = std::move(header.tensors);
  metadata_ = std::move(header.metadata);
}

std::span<const std::byte> SafetensorsFile::data(const TensorEntry& entry) const {
  return file_.bytes().subspan(entry.offset, entry.bytes);
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, const std::vector<TensorLayout>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), tensors_(check_layout(path, tensors)), file_(path) {
  const std::string header = header_text(path, tensors, tensors_, metadata);
  const uint64_t header_bytes = header.size();
  file_.write(&header_bytes, sizeof(header_bytes));
  file_.write(header);
}

void SafetensorsWriter::append(std::span<const std::byte> data) {
  if (next_ == tensors_.size()) throw UsageError(path_.string() + ": all its tensors are written already");
  const auto& [name, bytes] = tensors_[next_++];
  if (bytes != data.size()) {
    throw UsageError(path_.string() + ": tensor '" + name + "': got " + std::to_string(data.size()) + " bytes, need " +
                     std::to_string(bytes));
  }
  file_.write(data.data(), data.size());
}

void SafetensorsWriter::commit() {
  if (next_ != tensors_.size())
    throw UsageError(path_.string() + ": tensor '" + tensors_[next_].first + "' is missing");
  file_.commit();
}

void write_safetensors(const std::filesystem::path& path, const std::vector<TensorSource>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<TensorLayout> layout;
  for (const TensorSource& tensor : tensors) layout.push_back({tensor.name, tensor.dtype, tensor.shape});
  SafetensorsWriter writer(path, layout, metadata);
  for (const TensorSource& tensor : tensors) writer.append(tensor.data);
  writer.commit();
}

}  // namespace furlong
