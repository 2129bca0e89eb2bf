#include <fmt/format.h>

#include <cstdio>
#include <map>
#include <memory>

#include "app/commands.h"
#include "app/format.h"
#include "app/model_config.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/checkpoint/run_folder.h"
#include "furlong/model/count.h"
#include "furlong/model/weights.h"

namespace furlong::app {

namespace {

namespace fs = std::filesystem;

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

OrderedJson describe_tensors(const fs::path& path) {
  const CheckpointReader reader(path);
  OrderedJson list = OrderedJson::array();
  for (const std::string& name : reader.names()) {
    list.push_back({{"name", name},
                    {"dtype", reader.dtype(name)},
                    {"shape", reader.shape(name)},
                    {"checksum", tensor_checksum(reader.tensor(name))}});
  }
  OrderedJson result;
  result["metadata"] = reader.metadata();
  result["tensors"] = std::move(list);
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

void print_tensors(const OrderedJson& tensors) {
  std::map<std::string, std::pair<int64_t, double>> by_dtype;
  for (const OrderedJson& tensor : tensors["tensors"]) {
    double elements = 1;
    for (const auto& size : tensor["shape"]) elements *= size.get<double>();
    auto& [number, sum] = by_dtype[tensor["dtype"].get<std::string>()];
    number += 1;
    sum += elements;
    fmt::print("  {:<72} {:<5} {:<18} {}\n", tensor["name"].get<std::string>(), tensor["dtype"].get<std::string>(),
               tensor["shape"].dump(), tensor["checksum"].get<std::string>());
  }
  for (const auto& [dtype, sums] : by_dtype) {
    fmt::print("{}: {} tensors, {} elements\n", dtype, sums.first, human_count(sums.second));
  }
  for (const auto& [key, value] : tensors["metadata"].items()) {
    fmt::print("{} = {}\n", key, value.get<std::string>());
  }
}

bool holds_tensors(const fs::path& folder) {
  return fs::exists(folder / "model.safetensors") || fs::exists(folder / "model.safetensors.index.json");
}

OrderedJson inspect(const fs::path& path) {
  if (!fs::exists(path)) throw IoError(path.string() + ": no such file or folder");
  OrderedJson result;
  if (fs::is_directory(path)) {
    const fs::path folder = find_checkpoint(path);
    result["path"] = folder.string();
    result["model"] = describe_config(ModelConfig::load(folder));
    if (holds_tensors(folder)) result["file"] = describe_tensors(folder);
    return result;
  }
  result["path"] = path.string();
  if (path.extension() == ".toml" || path.extension() == ".json") {
    result["model"] = describe_config(load_model_config(path));
  } else if (path.extension() == ".safetensors") {
    result["file"] = describe_tensors(path);
  } else {
    throw UsageError(path.string() +
                     ": need a model or training TOML, a config.json, a .safetensors file, a checkpoint or a run");
  }
  return result;
}

}  // namespace

void add_inspect(CLI::App& app, int&) {
  auto* command = app.add_subcommand("inspect", "Say what a config, checkpoint or tensor file holds");
  struct Arguments {
    std::string path;
    bool json = false;
  };
  const auto arguments = std::make_shared<Arguments>();
  command
      ->add_option("path", arguments->path,
                   "Model or training TOML, config.json, checkpoint, run folder or .safetensors file")
      ->required();
  command->add_flag("--json", arguments->json, "One JSON object");
  command->footer(
      "Examples:\n"
      "  furlong inspect configs/model/kimi-k3.toml\n"
      "  furlong inspect out/demo/run --json");
  command->callback([arguments] {
    const OrderedJson result = inspect(arguments->path);
    if (arguments->json) {
      fmt::print("{}\n", result.dump(2));
    } else {
      fmt::print("{}\n", result["path"].get<std::string>());
      if (result.contains("model")) print_config(result["model"]);
      if (result.contains("file")) print_tensors(result["file"]);
    }
    std::fflush(stdout);
    // What does not fit is shown, then refused as every command that loads it would.
    if (result.contains("model") && result.contains("file")) check_weights(result["path"].get<std::string>());
  });
}

}  // namespace furlong::app
