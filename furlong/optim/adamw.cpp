#include "furlong/optim/adamw.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include <map>
#include <utility>

namespace furlong {

namespace {

/// Parameters that share a call of the library's kernel: same device, same decay.
struct Group {
  std::vector<at::Tensor> weights, grads, exp_avgs, exp_avg_sqs, steps;
};

}  // namespace

// The library's fused kernel makes one pass over memory (read w, g, m, v; write w, m, v), vectorised for the machine at
// hand, on CPU and CUDA.
void adamw_step(const std::vector<AdamWParam>& params, const AdamWConfig& config, double lr, int64_t step) {
  const c10::NoGradGuard no_grad;
  std::map<std::pair<bool, std::string>, Group> groups;
  for (const AdamWParam& param : params) {
    if (param.weight.numel() == 0) continue;
    Group& group = groups[{param.weight_decay, param.weight.device().str()}];
    if (group.steps.empty()) {
      group.steps.push_back(at::full({}, static_cast<double>(step), param.weight.options().dtype(at::kFloat)));
    } else {
      group.steps.push_back(group.steps.front());
    }
    group.weights.push_back(param.weight);
    group.grads.push_back(param.grad);
    group.exp_avgs.push_back(param.exp_avg);
    group.exp_avg_sqs.push_back(param.exp_avg_sq);
  }
  for (auto& [key, group] : groups) {
    at::_fused_adamw_(group.weights, group.grads, group.exp_avgs, group.exp_avg_sqs, {}, group.steps, lr, config.beta1,
                      config.beta2, key.first ? config.weight_decay : 0.0, config.eps, /*amsgrad=*/false,
                      /*maximize=*/false);
  }
}

}  // namespace furlong
