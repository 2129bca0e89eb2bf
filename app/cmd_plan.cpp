#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>

#include "app/commands.h"
#include "app/format.h"
#include "app/model_config.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/checkpoint/run_folder.h"
#include "furlong/model/checkpoint_map.h"
#include "furlong/model/count.h"
#include "furlong/model/plan.h"

namespace furlong::app {

namespace {

struct Arguments {
  std::string config;
  PlanRequest request;
  std::string compute = "fp32";
  bool json = false;
};

/// Bytes of the tensors of a checkpoint folder, after checking that they fit its config; none where there are none.
std::optional<double> stored_bytes(const Arguments& arguments, const ModelConfig& config) {
  namespace fs = std::filesystem;
  if (!fs::is_directory(arguments.config)) return {};
  const fs::path folder = find_checkpoint(arguments.config);
  if (!fs::exists(folder / "model.safetensors") && !fs::exists(folder / "model.safetensors.index.json")) return {};
  const CheckpointReader reader(folder);
  map_checkpoint(Decoder(config), reader, folder);
  double bytes = 0;
  for (const std::string& name : reader.names()) bytes += static_cast<double>(reader.byte_size(name));
  return bytes;
}

OrderedJson to_json(const Arguments& arguments, const TrainingBytes& training, const ServingBytes& serving) {
  return {{"config", arguments.config},
          {"context", arguments.request.context},
          {"batch", arguments.request.batch},
          {"compute", arguments.compute},
          {"recompute", arguments.request.recompute},
          {"training_bytes",
           {{"weights", training.weights},
            {"gradients", training.gradients},
            {"optimizer", training.optimizer},
            {"activations", training.activations},
            {"total", training.total()}}},
          {"serving_bytes",
           {{"weights", serving.weights},
            {"state", serving.state},
            {"conv_state", serving.conv_state},
            {"cache", serving.cache},
            {"total", serving.total()}}}};
}

void print(const Arguments& arguments, const ModelConfig& config, const TrainingBytes& training,
           const ServingBytes& serving) {
  const ModelCount sizes = count(config);
  const auto line = [](const char* what, double bytes, const char* note) {
    fmt::print("  {:<14} {:>12}   {}\n", what, human_bytes(bytes), note);
  };
  fmt::print("{}: {} parameters, {} active for a token\n", arguments.config, human_count(sizes.parameters),
             human_count(sizes.active_parameters));
  fmt::print("\ntraining, {} x {} tokens in one forward, {} compute{}\n", arguments.request.batch,
             arguments.request.context, arguments.compute, arguments.request.recompute ? ", layers recomputed" : "");
  line("weights", training.weights, "fp32 masters");
  line("gradients", training.gradients, "fp32");
  line("optimizer", training.optimizer, arguments.request.muon ? "Muon: one moment, AdamW: two" : "AdamW: two moments");
  line("activations", training.activations, "estimate");
  line("total", training.total(), "without the program itself (about 0.3 GB with LibTorch)");
  fmt::print("\nserving, {} sequences of {} tokens, {}\n", arguments.request.batch, arguments.request.context,
             arguments.compute);
  line("weights", serving.weights, "");
  line("state", serving.state, "KDA, fp32, the same at any length");
  line("conv state", serving.conv_state, "");
  line("cache", serving.cache, "MLA latents");
  line("total", serving.total(), "");
}

}  // namespace

void add_plan(CLI::App& app, int&) {
  auto* command = app.add_subcommand("plan", "Bytes a run will take, before it starts");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("config", arguments->config, "Model or training TOML, config.json, checkpoint or run folder")
      ->required();
  command->add_option("--context", arguments->request.context, "Tokens of a sequence")
      ->required()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  command->add_option("--batch", arguments->request.batch, "Sequences in one forward")
      ->required()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24));
  command->add_option("--compute", arguments->compute, "Precision of activations")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
  command->add_flag("--recompute", arguments->request.recompute, "Keep only layer inputs for backward");
  command->add_flag("!--adamw", arguments->request.muon, "AdamW for every parameter");
  command->add_flag("--json", arguments->json, "One JSON object");
  command->footer(
      "Examples:\n"
      "  furlong plan configs/model/nano.toml --context 1024 --batch 8\n"
      "  furlong plan configs/model/kimi-k3.toml --context 1048576 --batch 1 --compute bf16 --json");
  command->callback([arguments] {
    const ModelConfig config = load_model_config(arguments->config);
    arguments->request.bf16 = arguments->compute == "bf16";
    const TrainingBytes training = plan_training(config, arguments->request);
    const ServingBytes serving = plan_serving(config, arguments->request);
    const std::optional<double> stored = stored_bytes(*arguments, config);
    if (arguments->json) {
      OrderedJson result = to_json(*arguments, training, serving);
      if (stored) result["stored_bytes"] = *stored;
      fmt::print("{}\n", result.dump(2));
    } else {
      print(*arguments, config, training, serving);
      if (stored) fmt::print("\nthe folder's tensors take {}, checked against its config\n", human_bytes(*stored));
    }
  });
}

}  // namespace furlong::app
