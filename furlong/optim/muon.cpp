#include "furlong/optim/muon.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "furlong/base/error.h"
#include "furlong/optim/muon_blocks.h"
#include "furlong/optim/newton_schulz.h"

namespace furlong {

namespace {

/// Blocks that share a batch: device, smaller side, larger side.
using GroupKey = std::tuple<at::DeviceType, at::DeviceIndex, int64_t, int64_t>;

/// Bytes of the four Newton-Schulz buffers together: on a CPU they should stay in cache (measured in the README), on
/// other devices they should fill the machine and not its memory.
constexpr int64_t kChunkBytesCpu = int64_t{4} << 20;
constexpr int64_t kChunkBytesDevice = int64_t{1} << 30;

std::map<GroupKey, std::vector<MuonRun>> group_by_shape(const std::vector<MuonParam>& params) {
  std::map<GroupKey, std::vector<MuonRun>> groups;
  for (const MuonParam& param : params) {
    if (param.weight.numel() == 0) continue;
    const int64_t cols = param.weight.size(-1);
    const int64_t rows = param.weight.numel() / cols / param.blocks;
    const at::Device device = param.weight.device();
    groups[{device.type(), device.index(), std::min(rows, cols), std::max(rows, cols)}].push_back(
        {&param, 0, param.blocks, rows, cols});
  }
  return groups;
}

/// The next blocks of a group, at most `batch`, cut off the front of `runs` from position `*next`.
std::vector<MuonRun> take(const std::vector<MuonRun>& runs, size_t* next, int64_t* done, int64_t batch) {
  std::vector<MuonRun> taken;
  while (*next < runs.size() && batch > 0) {
    MuonRun run = runs[*next];
    run.first += *done;
    run.count = std::min(run.count - *done, batch);
    batch -= run.count;
    *done += run.count;
    if (*done == runs[*next].count) {
      ++*next;
      *done = 0;
    }
    taken.push_back(run);
  }
  return taken;
}

double update_scale(const MuonRun& run, const MuonConfig& config) {
  const auto rows = static_cast<double>(run.rows);
  const auto cols = static_cast<double>(run.cols);
  if (config.scale == "original") return std::sqrt(std::max(1.0, rows / cols));
  return config.update_rms * std::sqrt(std::max(rows, cols));
}

using Gather = void (*)(const MuonRun&, const MuonConfig&, const at::Tensor&);
using Scatter = void (*)(const MuonRun&, const at::Tensor&, double, double);

void step_group(const std::vector<MuonRun>& runs, const MuonConfig& config, double lr, int64_t chunk_bytes,
                Gather gather, Scatter scatter) {
  const int64_t rows = std::min(runs[0].rows, runs[0].cols);
  const int64_t cols = std::max(runs[0].rows, runs[0].cols);
  int64_t blocks = 0;
  for (const MuonRun& run : runs) blocks += run.count;
  const int64_t block_bytes = 2 * rows * (rows + cols) * (config.bf16 ? 2 : 4);
  const int64_t batch = std::clamp<int64_t>(chunk_bytes / block_bytes, 1, blocks);
  NewtonSchulzBuffers buffers(batch, rows, cols,
                              runs[0].param->weight.options().dtype(config.bf16 ? at::kBFloat16 : at::kFloat));
  size_t next = 0;
  int64_t done = 0;
  while (next < runs.size()) {
    const std::vector<MuonRun> chunk = take(runs, &next, &done, batch);
    int64_t used = 0;
    for (const MuonRun& run : chunk) {
      gather(run, config, buffers.x_BRC.narrow(0, used, run.count));
      used += run.count;
    }
    const at::Tensor o_BRC = newton_schulz_(buffers, used, config.newton_schulz_steps);
    used = 0;
    for (const MuonRun& run : chunk) {
      const double keep = run.param->weight_decay ? 1.0 - lr * config.weight_decay : 1.0;
      scatter(run, o_BRC.narrow(0, used, run.count), keep, lr * update_scale(run, config));
      used += run.count;
    }
  }
}

}  // namespace

void muon_gather_reference(const MuonRun& run, const MuonConfig& config, const at::Tensor& x_BRC) {
  const at::Tensor grad = run.of(run.param->grad);
  at::Tensor momentum = run.of(run.param->momentum);
  const double grad_factor = config.average_momentum ? 1.0 - config.momentum : 1.0;
  momentum.mul_(config.momentum).add_(grad, grad_factor);
  const at::Tensor direction = config.nesterov ? grad.mul(grad_factor).add_(momentum, config.momentum) : momentum;
  const at::Tensor norm_B11 = at::linalg_vector_norm(direction, 2, {1, 2}, true).clamp_min(config.eps);
  const at::Tensor unit = direction.div(norm_B11);
  x_BRC.copy_(run.transposed() ? unit.mT() : unit);
}

void muon_scatter_reference(const MuonRun& run, const at::Tensor& o_BRC, double keep, double rate) {
  at::Tensor weight = run.of(run.param->weight);
  if (keep != 1.0) weight.mul_(keep);
  weight.add_(run.transposed() ? o_BRC.mT() : o_BRC, -rate);
}

void muon_step(const std::vector<MuonParam>& params, const MuonConfig& config, double lr) {
  const c10::NoGradGuard no_grad;
  for (const auto& [key, runs] : group_by_shape(params)) {
    if (std::get<at::DeviceType>(key) == at::kCPU) {
      step_group(runs, config, lr, kChunkBytesCpu, muon_gather_cpu, muon_scatter_cpu);
    } else {
      step_group(runs, config, lr, kChunkBytesDevice, muon_gather_reference, muon_scatter_reference);
    }
  }
}

void muon_step_reference(const std::vector<MuonParam>& params, const MuonConfig& config, double lr) {
  const c10::NoGradGuard no_grad;
  for (const auto& [key, runs] : group_by_shape(params)) {
    step_group(runs, config, lr, kChunkBytesDevice, muon_gather_reference, muon_scatter_reference);
  }
}

}  // namespace furlong
