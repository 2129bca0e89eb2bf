#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "app/commands.h"
#include "furlong/checkpoint/run_folder.h"
#include "furlong/model/compare.h"
#include "furlong/model/weights.h"
#include "furlong/tokenizer/tokenizer.h"

namespace furlong::app {

namespace {

struct Arguments {
  std::string a, b, text;
  std::string dtype_a = "fp32", dtype_b = "fp32", numerics = "fast";
  std::vector<int64_t> ids;
  bool json = false;
};

OrderedJson to_json(const Comparison& comparison) {
  OrderedJson result = {{"tokens", comparison.tokens},
                        {"tokens_with_flips", comparison.tokens_with_flips},
                        {"logit_difference", comparison.logit_difference},
                        {"median_cosine", comparison.median_cosine},
                        {"smallest_cosine", comparison.smallest_cosine},
                        {"mean_divergence", comparison.mean_divergence},
                        {"other_argmax", comparison.other_argmax},
                        {"layers", OrderedJson::array()}};
  if (comparison.first_flip) {
    const RoutingFlip& flip = *comparison.first_flip;
    result["first_flip"] = {{"layer", flip.layer}, {"token", flip.token}, {"margin", flip.margin}};
  }
  for (const LayerComparison& layer : comparison.layers) {
    result["layers"].push_back({{"difference", layer.difference},
                                {"median_cosine", layer.median_cosine},
                                {"flipped_tokens", layer.flipped_tokens},
                                {"largest_margin", layer.largest_margin}});
  }
  return result;
}

void print(const Comparison& comparison) {
  fmt::print("layer  difference  median cosine  other experts  largest margin\n");
  for (size_t i = 0; i < comparison.layers.size(); ++i) {
    const LayerComparison& layer = comparison.layers[i];
    fmt::print("{:<6} {:<11.2e} {:<14.7f} {:<14} {:.2e}\n", i, layer.difference, layer.median_cosine,
               layer.flipped_tokens, layer.largest_margin);
  }
  if (comparison.first_flip) {
    const RoutingFlip& flip = *comparison.first_flip;
    fmt::print("routing flipped first at layer {}, token {}, margin {:.2e}; {} of {} tokens in some layer\n",
               flip.layer, flip.token, flip.margin, comparison.tokens_with_flips, comparison.tokens);
  } else {
    fmt::print("routing: the same experts everywhere\n");
  }
  fmt::print(
      "logits: difference {:.2e}, cosine median {:.7f}, smallest {:.7f}; divergence {:.2e} nats; {} of {} tokens "
      "have another likeliest successor\n",
      comparison.logit_difference, comparison.median_cosine, comparison.smallest_cosine, comparison.mean_divergence,
      comparison.other_argmax, comparison.tokens);
}

at::ScalarType dtype_of(const std::string& name) {
  return name == "bf16" ? at::kBFloat16 : at::kFloat;
}

void compare(Arguments& arguments) {
  if (arguments.ids.empty() == arguments.text.empty()) throw UsageError("compare: needs either --ids or --text");
  const std::filesystem::path folder_a = find_checkpoint(arguments.a);
  const std::filesystem::path folder_b = arguments.b.empty() ? folder_a : find_checkpoint(arguments.b);
  if (!arguments.text.empty()) arguments.ids = Tokenizer::load(folder_a).encode(arguments.text);
  const auto a = load_decoder(folder_a, dtype_of(arguments.dtype_a), at::kCPU);
  const auto b = load_decoder(folder_b, dtype_of(arguments.dtype_b), at::kCPU);
  const Numerics numerics = arguments.numerics == "exact" ? Numerics::kExact : Numerics::kFast;
  const Comparison comparison = compare_decoders(*a, *b, at::tensor(arguments.ids, at::kLong), numerics);
  if (arguments.json) {
    fmt::print("{}\n", to_json(comparison).dump(2));
  } else {
    print(comparison);
  }
}

}  // namespace

void add_compare(CLI::App& app, int&) {
  auto* command = app.add_subcommand("compare", "Two checkpoints, or two precisions of one, on the same tokens");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("a", arguments->a, "Run, checkpoint or Hugging Face folder")->required();
  command->add_option("b", arguments->b, "The other one; left out: the same");
  command->add_option("--ids", arguments->ids, "Token ids, separated by commas")->delimiter(',');
  command->add_option("--text", arguments->text, "Text to encode with a's tokenizer");
  for (const auto& [name, dtype] : {std::pair("--dtype-a", &arguments->dtype_a), {"--dtype-b", &arguments->dtype_b}}) {
    command->add_option(name, *dtype, "Precision of weights and activations")
        ->check(CLI::IsMember({"fp32", "bf16"}))
        ->capture_default_str();
  }
  command->add_option("--numerics", arguments->numerics, "exact: bits do not depend on how tokens are split")
      ->check(CLI::IsMember({"fast", "exact"}))
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "One JSON object");
  command->footer(
      "Examples:\n"
      "  furlong compare out/demo/run --dtype-b bf16 --text \"In the beginning\"\n"
      "  furlong compare Kimi-Linear-48B-A3B-Instruct out/mine --ids 163587,2482,163601");
  command->callback([arguments] { compare(*arguments); });
}

}  // namespace furlong::app
