#include <ATen/core/grad_mode.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>
#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "app/commands.h"
#include "furlong/checkpoint/named_tensors.h"
#include "furlong/checkpoint/run_folder.h"
#include "furlong/model/weights.h"

namespace furlong::app {

namespace {

struct Arguments {
  std::string checkpoint, out;
  std::vector<int64_t> ids;
  std::string dtype = "fp32", numerics = "fast";
  int64_t top = 5;
};

void print_top(const at::Tensor& logits_NV, const std::vector<int64_t>& ids, int64_t count) {
  const auto [values_NK, ids_NK] = at::log_softmax(logits_NV, 1).topk(std::min(count, logits_NV.size(1)), 1);
  fmt::print("position  id        next id (log-probability)\n");
  for (int64_t n = 0; n < logits_NV.size(0); ++n) {
    fmt::print("{:<9} {:<9}", n, ids[n]);
    for (int64_t k = 0; k < ids_NK.size(1); ++k) {
      fmt::print(" {} ({:.4f})", ids_NK[n][k].item<int64_t>(), values_NK[n][k].item<float>());
    }
    fmt::print("\n");
  }
}

void logits(const Arguments& arguments) {
  const at::NoGradGuard no_grad;
  const Numerics numerics = arguments.numerics == "exact" ? Numerics::kExact : Numerics::kFast;
  const auto decoder = load_decoder(find_checkpoint(arguments.checkpoint),
                                    arguments.dtype == "bf16" ? at::kBFloat16 : at::kFloat, at::kCPU);
  const at::Tensor ids_N = at::tensor(arguments.ids, at::kLong);
  ForwardRecord record;
  record.keep_stream = !arguments.out.empty();
  const at::Tensor hidden_ND = decoder->forward(ids_N, SequenceLayout::from_lengths({ids_N.size(0)}, at::kCPU), nullptr,
                                                {.numerics = numerics, .record = &record});
  const at::Tensor logits_NV = decoder->logits(hidden_ND, numerics);
  print_top(logits_NV, arguments.ids, arguments.top);
  if (arguments.out.empty()) return;
  NamedTensors tensors = {{"ids", ids_N}, {"logits", logits_NV}, {"hidden", hidden_ND}};
  for (size_t i = 0; i < record.stream_ND.size(); ++i) {
    tensors.emplace_back(fmt::format("stream.{}", i), record.stream_ND[i]);
    if (record.layers[i].expert_ids_NA.defined()) {
      tensors.emplace_back(fmt::format("experts.{}", i), record.layers[i].expert_ids_NA);
      tensors.emplace_back(fmt::format("margin.{}", i), record.layers[i].margin_N);
    }
  }
  write_tensors(arguments.out, tensors);
}

}  // namespace

void add_logits(CLI::App& app, int&) {
  auto* command = app.add_subcommand("logits", "Logits after each of some token ids, to compare with other software");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("checkpoint", arguments->checkpoint, "Run, checkpoint or Hugging Face folder")->required();
  command->add_option("--ids", arguments->ids, "Token ids, separated by commas")->required()->delimiter(',');
  command->add_option("--compute,--dtype", arguments->dtype, "Precision of weights and activations")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
  command->add_option("--numerics", arguments->numerics, "exact: bits do not depend on how tokens are split")
      ->check(CLI::IsMember({"fast", "exact"}))
      ->capture_default_str();
  command->add_option("--top", arguments->top, "Likeliest next ids to print")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--out", arguments->out,
                      "A .safetensors file: ids, logits, hidden, stream.L after each layer, experts.L, margin.L");
  command->footer(
      "Example:\n"
      "  furlong logits Kimi-Linear-48B-A3B-Instruct --ids 163587,2482,163601 --out logits.safetensors");
  command->callback([arguments] { logits(*arguments); });
}

}  // namespace furlong::app
