#include "furlong/optim/optimizer.h"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <map>

#include "furlong/base/shape.h"
#include "furlong/optim/adamw.h"
#include "furlong/optim/muon.h"

namespace furlong {

namespace {

void check_param(const Param& param, bool muon) {
  const at::Tensor& tensor = *param.tensor;
  const std::string& name = param.spec.name;
  check_argument(tensor.defined(), "optimizer", name + ": got no tensor");
  check_dtype("optimizer", name.c_str(), tensor, at::kFloat);
  check_argument(tensor.is_contiguous(), "optimizer", name + ": must be contiguous");
  if (!muon) return;
  const int64_t blocks = param.spec.muon_blocks;
  check_argument(tensor.dim() >= 2, "optimizer", name + ": Muon needs a matrix, got " + shape_text(tensor.sizes()));
  const int64_t rows = tensor.size(-1) == 0 ? 0 : tensor.numel() / tensor.size(-1);
  check_argument(blocks >= 1 && rows % blocks == 0, "optimizer",
                 name + ": " + std::to_string(rows) + " rows do not divide into " + std::to_string(blocks) + " blocks");
}

}  // namespace

Optimizer::Optimizer(const std::vector<Param>& params, const OptimizerConfig& config) : config_(config) {
  for (const Param& param : params) {
    if (param.spec.rule == OptimizerRule::kFrozen) continue;
    const bool muon = config.use_muon && param.spec.rule == OptimizerRule::kMuon;
    check_param(param, muon);
    Slot slot{param, {}, {}, {}};
    const at::Tensor zeros = at::zeros_like(param.tensor->detach());
    if (muon) {
      slot.momentum = zeros;
    } else {
      slot.exp_avg = zeros;
      slot.exp_avg_sq = at::zeros_like(zeros);
    }
    slots_.push_back(std::move(slot));
  }
}

void Optimizer::step(double lr) {
  ++num_steps_;
  std::vector<MuonParam> muon;
  std::vector<AdamWParam> adamw;
  for (const Slot& slot : slots_) {
    const at::Tensor weight = slot.param.tensor->detach();
    at::Tensor grad = slot.param.tensor->grad();
    if (!grad.defined()) continue;
    grad = grad.detach().to(at::kFloat).contiguous();
    const ParamSpec& spec = slot.param.spec;
    if (slot.momentum.defined()) {
      muon.push_back({weight, grad, slot.momentum, spec.muon_blocks, spec.weight_decay});
    } else {
      adamw.push_back({weight, grad, slot.exp_avg, slot.exp_avg_sq, spec.weight_decay});
    }
  }
  muon_step(muon, config_.muon, lr);
  adamw_step(adamw, config_.adamw, lr * config_.adamw_lr_scale, num_steps_);
}

void Optimizer::zero_grad() {
  for (const Slot& slot : slots_) slot.param.tensor->mutable_grad() = at::Tensor();
}

std::vector<std::pair<std::string, at::Tensor>> Optimizer::state() const {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const Slot& slot : slots_) {
    const std::string& name = slot.param.spec.name;
    if (slot.momentum.defined()) {
      result.emplace_back(name + ".momentum", slot.momentum);
    } else {
      result.emplace_back(name + ".exp_avg", slot.exp_avg);
      result.emplace_back(name + ".exp_avg_sq", slot.exp_avg_sq);
    }
  }
  return result;
}

void Optimizer::load_state(const std::vector<std::pair<std::string, at::Tensor>>& state, int64_t num_steps) {
  const std::map<std::string, at::Tensor> by_name(state.begin(), state.end());
  const auto own = this->state();
  for (const auto& [name, moment] : own) {
    const auto found = by_name.find(name);
    if (found == by_name.end()) throw FormatError("optimizer state: '" + name + "' is missing");
    if (found->second.sizes() != moment.sizes()) {
      throw FormatError("optimizer state: '" + name + "': got " + shape_text(found->second.sizes()) + ", need " +
                        shape_text(moment.sizes()));
    }
  }
  const c10::NoGradGuard no_grad;
  for (const auto& [name, moment] : own) moment.copy_(by_name.at(name));
  num_steps_ = num_steps;
}

}  // namespace furlong
