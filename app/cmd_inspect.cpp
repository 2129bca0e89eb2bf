#include <fmt/format.h>

#include <cstdio>
#include <map>
#include <memory>
#include <optional>

#include "app/commands.h"
#include "app/format.h"
#include "app/model_config.h"
#include "furlong/checkpoint/checksum.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/checkpoint/run_folder.h"
#include "furlong/model/checkpoint_map.h"
#include "furlong/model/count.h"
#include "furlong/model/hf_folder.h"

namespace furlong::app {

namespace {

namespace fs = std::filesystem;

constexpr int64_t kListedTensors = 2000;
constexpr uint64_t kChecksumBytes = 4'000'000'000;  // a few seconds

struct Arguments {
  std::string path;
  bool json = false;
  bool tensors = false;
  bool checksums = false, no_checksums = false;
};

/// "kKKM": one letter a layer, K for KDA and M for MLA, small where the feed-forward is dense.
std::string layer_pattern(const ModelConfig& config) {
  std::string pattern;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const char letter = config.is_full_attention(layer) ? 'M' : 'K';
    pattern += config.is_moe(layer) ? letter : static_cast<char>(letter - 'A' + 'a');
  }
  return pattern;
}

OrderedJson describe_config(const ModelConfig& config) {
  const ModelCount sizes = count(config);
  return {{"family", config.has_k3_mechanism() ? "kimi_k3" : "kimi_linear"},
          {"layers", layer_pattern(config)},
          {"parameters", sizes.parameters},
          {"active_parameters", sizes.active_parameters},
          {"embedding_parameters", sizes.embedding_parameters},
          {"routed_expert_parameters", sizes.routed_expert_parameters},
          {"flops_per_token", sizes.flops_per_token},
          {"kda_flops_per_token", sizes.kda_flops_per_token},
          {"state_bytes", sizes.state_bytes},
          {"conv_state_bytes", sizes.conv_state_bytes},
          {"cache_bytes_per_token", sizes.cache_bytes_per_token},
          {"config", config_to_json(config)}};
}

OrderedJson describe_group(const GroupReport& group) {
  OrderedJson result = {
      {"group", group.name}, {"tensors", group.tensors}, {"bytes", group.bytes}, {"dtypes", group.dtypes}};
  if (!group.checksum.empty()) result["checksum"] = group.checksum;
  return result;
}

OrderedJson list_tensors(const CheckpointReader& reader, bool checksums) {
  OrderedJson list = OrderedJson::array();
  for (const std::string& name : reader.names()) {
    OrderedJson tensor = {{"name", name}, {"dtype", reader.dtype(name)}, {"shape", reader.shape(name)}};
    if (checksums) tensor["checksum"] = checksum_text(checksum64(reader.bytes(name)));
    list.push_back(std::move(tensor));
  }
  return list;
}

OrderedJson describe_tensors(const CheckpointReader& reader, const std::optional<ModelConfig>& config,
                             const Arguments& arguments) {
  std::map<std::string, std::pair<int64_t, double>> by_dtype;
  uint64_t bytes = 0;
  int64_t number = 0;
  for (const std::string& name : reader.names()) {
    double elements = 1;
    for (const int64_t size : reader.shape(name)) elements *= static_cast<double>(size);
    auto& [tensors, sum] = by_dtype[reader.dtype(name)];
    ++tensors;
    sum += elements;
    bytes += reader.byte_size(name);
    ++number;
  }
  const bool checksums = arguments.checksums || (!arguments.no_checksums && bytes <= kChecksumBytes);
  OrderedJson result = {{"files", reader.files().size()}, {"tensor_count", number}, {"bytes", bytes}};
  for (const auto& [dtype, sums] : by_dtype) {
    result["dtypes"][dtype] = {{"tensors", sums.first}, {"elements", sums.second}};
  }
  if (config) {
    for (const GroupReport& group : describe_checkpoint(*config, reader, checksums)) {
      result["groups"].push_back(describe_group(group));
    }
  }
  if (!checksums) result["checksums"] = "not taken: --checksums reads every byte";
  result["metadata"] = reader.metadata();
  if (arguments.tensors || number <= kListedTensors) result["tensors"] = list_tensors(reader, checksums);
  return result;
}

void print_config(const OrderedJson& model) {
  const auto number = [&](const char* key) { return model[key].get<double>(); };
  fmt::print("{}: {} parameters, {} active for a token\n", model["family"].get<std::string>(),
             human_count(number("parameters")), human_count(number("active_parameters")));
  fmt::print("  layers           {}   (K: KDA, M: MLA; small letters: dense feed-forward)\n",
             model["layers"].get<std::string>());
  fmt::print("  embedding        {}\n", human_count(number("embedding_parameters")));
  fmt::print("  routed experts   {}\n", human_count(number("routed_expert_parameters")));
  fmt::print("  FLOPs a token    {} products, {} recurrence\n", human_count(number("flops_per_token")),
             human_count(number("kda_flops_per_token")));
  fmt::print("  a sequence       {} state, {} conv state, {} cache for each token (bf16)\n",
             human_bytes(number("state_bytes")), human_bytes(number("conv_state_bytes")),
             human_bytes(number("cache_bytes_per_token")));
  fmt::print("\n{}", json_to_toml(model["config"]));
}

void print_groups(const OrderedJson& groups) {
  fmt::print("\n");
  for (const OrderedJson& group : groups) {
    std::string dtypes;
    for (const auto& [dtype, tensors] : group["dtypes"].items()) {
      dtypes += fmt::format("{}{} {}", dtypes.empty() ? "" : ", ", tensors.get<int64_t>(), dtype);
    }
    fmt::print("  {:<20} {:>8} tensors {:>11}  {:<32} {}\n", group["group"].get<std::string>(),
               group["tensors"].get<int64_t>(), human_bytes(group["bytes"].get<double>()), dtypes,
               group.value("checksum", ""));
  }
}

void print_tensors(const OrderedJson& file) {
  if (file.contains("groups")) print_groups(file["groups"]);
  if (file.contains("tensors")) fmt::print("\n");
  for (const OrderedJson& tensor : file.value("tensors", OrderedJson::array())) {
    fmt::print("  {:<72} {:<5} {:<18} {}\n", tensor["name"].get<std::string>(), tensor["dtype"].get<std::string>(),
               tensor["shape"].dump(), tensor.value("checksum", ""));
  }
  fmt::print("\n{} tensors, {} in {} file{}\n", file["tensor_count"].get<int64_t>(),
             human_bytes(file["bytes"].get<double>()), file["files"].get<int64_t>(),
             file["files"].get<int64_t>() == 1 ? "" : "s");
  for (const auto& [dtype, sums] : file["dtypes"].items()) {
    fmt::print("{}: {} tensors, {} elements\n", dtype, sums["tensors"].get<int64_t>(),
               human_count(sums["elements"].get<double>()));
  }
  if (file.contains("carried")) {
    fmt::print("{} tensors of parts that are not run (vision) are carried through untouched\n", file["carried"].size());
  }
  if (!file.contains("tensors")) fmt::print("tensors are not listed: --tensors lists them\n");
  if (file.contains("checksums")) fmt::print("checksums {}\n", file["checksums"].get<std::string>());
  for (const auto& [key, value] : file["metadata"].items()) {
    fmt::print("{} = {}\n", key, value.get<std::string>());
  }
}

bool holds_tensors(const fs::path& folder) {
  return fs::exists(folder / "model.safetensors") || fs::exists(folder / "model.safetensors.index.json");
}

/// What a folder or file holds, and the fault that a command which loads it would report.
struct Inspection {
  OrderedJson result;
  std::optional<FormatError> fault;
};

void inspect_folder(const fs::path& folder, const Arguments& arguments, Inspection& inspection) {
  OrderedJson& result = inspection.result;
  const ModelConfig config = ModelConfig::load(folder);
  result["path"] = folder.string();
  result["model"] = describe_config(config);
  const Json quantization = quantization_of(folder);
  if (!quantization.is_null()) result["quantization"] = quantization;
  if (!holds_tensors(folder)) return;
  const CheckpointReader reader(folder);
  result["file"] = describe_tensors(reader, config, arguments);
  try {
    const std::vector<std::string> carried = map_checkpoint(Decoder(config), reader, folder).carried;
    if (!carried.empty()) result["file"]["carried"] = carried;
  } catch (const FormatError& error) {
    inspection.fault = error;
  }
}

Inspection inspect(const Arguments& arguments) {
  const fs::path path = arguments.path;
  if (!fs::exists(path)) throw IoError(path.string() + ": no such file or folder");
  Inspection inspection;
  if (fs::is_directory(path)) {
    inspect_folder(find_checkpoint(path), arguments, inspection);
    return inspection;
  }
  inspection.result["path"] = path.string();
  if (path.extension() == ".toml" || path.extension() == ".json") {
    inspection.result["model"] = describe_config(load_model_config(path));
  } else if (path.extension() == ".safetensors") {
    inspection.result["file"] = describe_tensors(CheckpointReader(path), std::nullopt, arguments);
  } else {
    throw UsageError(path.string() +
                     ": need a model or training TOML, a config.json, a .safetensors file, a checkpoint or a run");
  }
  return inspection;
}

void print(const OrderedJson& result) {
  fmt::print("{}\n", result["path"].get<std::string>());
  if (result.contains("model")) print_config(result["model"]);
  if (result.contains("quantization")) {
    const OrderedJson& quantization = result["quantization"];
    const auto text = [&](const char* key, const char* missing) {
      if (!quantization.contains(key)) return std::string(missing);
      const OrderedJson& value = quantization[key];
      return value.is_string() ? value.get<std::string>() : value.dump(-1, ' ', true);
    };
    fmt::print("\nquantization: {} ({})\n", text("format", "of no format"), text("quant_method", "no method"));
  }
  if (result.contains("file")) print_tensors(result["file"]);
}

}  // namespace

void add_inspect(CLI::App& app, int&) {
  auto* command = app.add_subcommand("inspect", "Say what a config, checkpoint or tensor file holds");
  const auto arguments = std::make_shared<Arguments>();
  command
      ->add_option("path", arguments->path,
                   "Model or training TOML, config.json, checkpoint or Hugging Face folder, run folder or .safetensors "
                   "file")
      ->required();
  command->add_flag("--json", arguments->json, "One JSON object");
  command->add_flag("--tensors", arguments->tensors, "List every tensor, however many there are");
  auto* checksums = command->add_flag("--checksums", arguments->checksums,
                                      "Read every byte for checksums; by default for checkpoints up to 4 GB");
  command->add_flag("--no-checksums", arguments->no_checksums, "Read the headers alone")->excludes(checksums);
  command->footer(
      "Examples:\n"
      "  furlong inspect configs/model/kimi-k3.toml\n"
      "  furlong inspect Kimi-Linear-48B-A3B-Instruct --checksums\n"
      "  furlong inspect out/demo/run --json");
  command->callback([arguments] {
    const Inspection inspection = inspect(*arguments);
    if (arguments->json) {
      fmt::print("{}\n", inspection.result.dump(2));
    } else {
      print(inspection.result);
    }
    std::fflush(stdout);
    // What does not fit is shown, then refused as every command that loads it would.
    if (inspection.fault) throw FormatError(*inspection.fault);
  });
}

}  // namespace furlong::app
