// Muon and AdamW, through the optimizer of the product.

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>

#include <string>
#include <vector>

#include "furlong/optim/optimizer.h"
#include "tests/support/golden.h"

namespace furlong::golden {
namespace {

/// Tensors "NAME.in", "NAME.out", "NAME.out_bf16"; the tolerance is absolute.
void run_newton_schulz(Case& golden) {
  const Json& constants = golden.info().at("constants");
  const auto steps = constants.at("steps").get<int64_t>();
  const auto eps = constants.at("eps").get<double>();
  for (const std::string& tensor : golden.names()) {
    const size_t suffix = tensor.rfind(".in");
    if (suffix == std::string::npos || suffix + 3 != tensor.size()) continue;
    const std::string name = tensor.substr(0, suffix);
    const at::Tensor expected = golden.f32(name + ".out");
    const auto worst = [&](const at::Tensor& got) { return got.sub(expected).abs().max().item<double>(); };
    const at::Tensor matrix = golden.f32(tensor).unsqueeze(0);
    const double error = worst(newton_schulz(matrix, steps, false, eps)[0]);
    golden.expect_below(name + ".out", error, golden.tolerance("absolute"));
    // In bf16 as far from the truth as the library's own bf16 run, within a factor of three (see the case's notes).
    const double library_error =
        golden.info().at("measured").at(name).at("torch bf16 run vs fp64 (max abs)").get<double>();
    golden.expect_below(name + ".out, bf16", worst(newton_schulz(matrix, steps, true, eps)[0]), 3 * library_error);
  }
}

MuonConfig muon_config(const Json& constants, bool bf16) {
  MuonConfig config;
  config.momentum = constants.at("momentum").get<double>();
  config.nesterov = constants.at("nesterov").get<bool>();
  config.newton_schulz_steps = constants.at("ns_steps").get<int64_t>();
  config.weight_decay = constants.at("weight_decay").get<double>();
  config.eps = constants.at("eps").get<double>();
  config.scale = constants.at("adjust_lr_fn") == "original" ? "original" : "rms";
  config.average_momentum = true;  // the library's convention
  config.bf16 = bf16;
  return config;
}

struct Run {
  at::Tensor weights;  // after each step
  std::vector<std::pair<std::string, at::Tensor>> state;
};

Run run_optimizer(const Case& golden, ParamSpec spec, const OptimizerConfig& config, double lr) {
  at::Tensor weight = golden.f32("weight").clone().requires_grad_(true);
  const at::Tensor grads = golden.f32("grads");
  spec.name = "weight";
  spec.shape = weight.sizes().vec();
  Optimizer optimizer({{spec, &weight}}, config);
  std::vector<at::Tensor> weights;
  for (int64_t step = 0; step < grads.size(0); ++step) {
    weight.mutable_grad() = grads[step];
    optimizer.step(lr);
    weights.push_back(weight.detach().clone());
  }
  return {at::stack(weights), optimizer.state()};
}

/// The per-head case's text alone says how many blocks there are: "cut into 4 row blocks".
int64_t muon_blocks(const Case& golden) {
  const auto text = golden.info().at("what").get<std::string>();
  const size_t at = text.find("cut into ");
  return at == std::string::npos ? 1 : std::stoll(text.substr(at + 9));
}

void run_muon_step(Case& golden) {
  const Json& constants = golden.info().at("constants");
  const double lr = constants.at("lr").get<double>();
  const at::Tensor start = golden.f32("weight");
  const at::Tensor expected = golden.f32("out.weights").sub(start);
  ParamSpec spec;
  spec.rule = OptimizerRule::kMuon;
  spec.muon_blocks = muon_blocks(golden);
  OptimizerConfig config;
  config.muon = muon_config(constants, false);
  const Run fp32 = run_optimizer(golden, spec, config, lr);
  golden.expect_close("update", fp32.weights.sub(start), expected, golden.tolerance("update"));
  golden.expect_close("momentum", fp32.state.at(0).second, golden.f32("out.momentum"), golden.tolerance("momentum"));
  // The papers' momentum is the same up to the factor 1 - mu.
  config.muon.average_momentum = false;
  const Run summed = run_optimizer(golden, spec, config, lr);
  golden.expect_close("update, summed momentum", summed.weights.sub(start), expected, golden.tolerance("update"));
  // 0.05: the case's recommendation for bf16 products.
  config.muon.bf16 = true;
  const Run bf16 = run_optimizer(golden, spec, config, lr);
  golden.expect_close("update, bf16 products", bf16.weights.sub(start), expected, 0.05);
}

void run_adamw(Case& golden) {
  const Json& constants = golden.info().at("constants");
  OptimizerConfig config;
  config.adamw.beta1 = constants.at("betas").at(0).get<double>();
  config.adamw.beta2 = constants.at("betas").at(1).get<double>();
  config.adamw.eps = constants.at("eps").get<double>();
  config.adamw.weight_decay = constants.at("weight_decay").get<double>();
  const Run run = run_optimizer(golden, {}, config, constants.at("lr").get<double>());
  golden.expect_close("weights", run.weights, golden.f32("out.weights"), golden.tolerance("values"));
  golden.expect_close("exp_avg", run.state.at(0).second, golden.f32("out.exp_avg"), golden.tolerance("values"));
  golden.expect_close("exp_avg_sq", run.state.at(1).second, golden.f32("out.exp_avg_sq"), golden.tolerance("values"));
}

FURLONG_GOLDEN("muon.newton_schulz", run_newton_schulz);
FURLONG_GOLDEN("muon.step", run_muon_step);
FURLONG_GOLDEN("adamw", run_adamw);

}  // namespace
}  // namespace furlong::golden
