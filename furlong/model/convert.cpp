#include "furlong/model/convert.h"

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/json.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/checkpoint/safetensors.h"
#include "furlong/model/checkpoint_map.h"
#include "furlong/model/hf_names.h"
#include "furlong/model/weights.h"

namespace furlong {

namespace {

namespace fs = std::filesystem;

constexpr const char* kPlanFile = "convert.json";

/// A tensor to write, and where it comes from.
struct Item {
  TensorLayout layout;
  const ParamPlace* place;  // null: carried, copied as it is
  uint64_t bytes;
};

std::string dtype_for(const ParamPlace& place, const std::string& stored, std::optional<at::ScalarType> asked) {
  const std::string plain = place.scale.empty() ? stored : "BF16";
  if (!asked) return plain;
  if (place.param->spec.dtype == DtypePolicy::kFp32) return "F32";
  return *asked == at::kBFloat16 ? "BF16" : "F32";
}

uint64_t bytes_of(const TensorLayout& layout) {
  auto bytes = static_cast<uint64_t>(safetensors_dtype_bytes(layout.dtype));
  for (const int64_t size : layout.shape) bytes *= static_cast<uint64_t>(size);
  return bytes;
}

class Conversion {
 public:
  Conversion(const fs::path& from, const fs::path& to, const ConvertOptions& options)
      : from_(from),
        to_(to),
        partial_(to.string() + ".partial"),
        options_(options),
        decoder_(ModelConfig::load(from)),
        reader_(from),
        map_(map_checkpoint(decoder_, reader_, from)) {
    list_items();
    divide();
  }

  ConvertResult run() {
    check_target();
    prepare_partial();
    ConvertResult result{.shards = static_cast<int64_t>(shards_.size()),
                         .tensors = static_cast<int64_t>(items_.size()),
                         .carried = static_cast<int64_t>(map_.carried.size())};
    for (size_t i = 0; i < shards_.size(); ++i) {
      const bool whole = fs::exists(partial_ / file_name(i));
      if (!whole) write_shard(i);
      result.reused_shards += whole ? 1 : 0;
      for (const Item* item : shards_[i]) result.bytes += item->bytes;
      if (options_.on_shard) options_.on_shard(static_cast<int64_t>(i) + 1, result.shards, result.bytes);
    }
    if (shards_.size() > 1) write_index(result.bytes);
    write_config();
    copy_other_files();
    fs::remove(partial_ / kPlanFile);
    sync_folder(partial_);
    fs::remove(to_);  // an empty folder may stand there
    fs::rename(partial_, to_);
    return result;
  }

 private:
  void list_items() {
    size_t next = 0;
    for (const Param& param : decoder_.params()) {
      for (const PublishedTensor& published : published_tensors(decoder_.config(), param)) {
        const ParamPlace& place = map_.places[next++];
        const std::string dtype = dtype_for(place, reader_.dtype(place.stored), options_.dtype);
        items_.push_back({{published.name, dtype, published.shape}, &place, 0});
      }
    }
    for (const std::string& name : map_.carried) {
      items_.push_back({{name, reader_.dtype(name), reader_.shape(name)}, nullptr, 0});
    }
    for (Item& item : items_) item.bytes = bytes_of(item.layout);
  }

  void divide() {
    uint64_t filled = 0;
    for (const Item& item : items_) {
      if (shards_.empty() || (filled > 0 && filled + item.bytes > options_.shard_bytes)) {
        shards_.emplace_back();
        filled = 0;
      }
      shards_.back().push_back(&item);
      filled += item.bytes;
    }
  }

  std::string file_name(size_t shard) const {
    if (shards_.size() == 1) return "model.safetensors";
    return fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, shards_.size());
  }

  void check_target() const {
    std::error_code code;
    if (fs::equivalent(from_, to_, code)) throw UsageError(to_.string() + ": is the folder to convert from");
    if (fs::exists(to_) && !(fs::is_directory(to_) && fs::is_empty(to_))) {
      throw UsageError(to_.string() + ": exists and is not an empty folder");
    }
  }

  /// Files of another source or other options are no use to this run.
  void prepare_partial() const {
    OrderedJson plan = {{"source", fs::canonical(from_).string()}, {"files", OrderedJson::object()}};
    for (const fs::path& file : reader_.files()) {
      plan["files"][file.filename().string()] = {fs::file_size(file),
                                                 fs::last_write_time(file).time_since_epoch().count()};
    }
    plan["dtype"] = options_.dtype ? c10::toString(*options_.dtype) : "as stored";
    plan["shard_bytes"] = options_.shard_bytes;
    const fs::path file = partial_ / kPlanFile;
    const std::string text = plan.dump(2) + "\n";
    if (fs::exists(file) && read_file(file) == text) return;
    fs::remove_all(partial_);
    make_folders(partial_);
    write_file_atomic(file, text);
  }

  void write_shard(size_t shard) const {
    std::vector<TensorLayout> layout;
    for (const Item* item : shards_[shard]) layout.push_back(item->layout);
    SafetensorsWriter writer(partial_ / file_name(shard), layout, {{"format", "pt"}});
    for (const Item* item : shards_[shard]) {
      if (item->place == nullptr) {
        writer.append(reader_.bytes(item->layout.name));
        continue;
      }
      const at::Tensor value = stored_form(read_parameter(*item->place, reader_, from_), *item->place->param,
                                           item->layout.shape, tensor_dtype(item->layout.dtype));
      writer.append({static_cast<const std::byte*>(value.const_data_ptr()), value.nbytes()});
    }
    writer.commit();
  }

  void write_index(uint64_t bytes) const {
    OrderedJson weight_map = OrderedJson::object();
    for (size_t i = 0; i < shards_.size(); ++i) {
      for (const Item* item : shards_[i]) {
        weight_map.get_ref<OrderedJson::object_t&>().emplace_back(item->layout.name, file_name(i));
      }
    }
    write_json_atomic(partial_ / "model.safetensors.index.json",
                      {{"metadata", {{"total_size", bytes}}}, {"weight_map", std::move(weight_map)}});
  }

  /// The source's own config with what the conversion changes: unpacked experts, the dtype.
  void write_config() const {
    OrderedJson config = OrderedJson::parse(read_file(from_ / "config.json"));
    for (OrderedJson* table : {&config, config.contains("text_config") ? &config["text_config"] : nullptr}) {
      if (table == nullptr) continue;
      if (map_.packed()) table->erase("quantization_config");
      if (options_.dtype && table->contains("torch_dtype")) {
        (*table)["torch_dtype"] = *options_.dtype == at::kBFloat16 ? "bfloat16" : "float32";
      }
    }
    write_json_atomic(partial_ / "config.json", config);
  }

  void copy_other_files() const {
    static const std::set<std::string> kNotCopied = {"config.json", "train_state.json"};
    for (const auto& entry : fs::directory_iterator(from_)) {
      const std::string name = entry.path().filename().string();
      if (!entry.is_regular_file() || name.starts_with(".") || kNotCopied.count(name) > 0) continue;
      if (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")) continue;
      write_file_atomic(partial_ / name, read_file(entry.path()));
    }
  }

  fs::path from_, to_, partial_;
  const ConvertOptions& options_;
  Decoder decoder_;  // holds no tensors
  CheckpointReader reader_;
  CheckpointMap map_;
  std::vector<Item> items_;
  std::vector<std::vector<const Item*>> shards_;
};

}  // namespace

ConvertResult convert_checkpoint(const fs::path& from, const fs::path& to, const ConvertOptions& options) {
  return Conversion(from, to, options).run();
}

}  // namespace furlong
