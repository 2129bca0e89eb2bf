#include "furlong/train/machine_limits.h"

#include <ATen/Context.h>
#include <c10/core/Device.h>
#include <fmt/format.h>

#include "furlong/base/error.h"
#include "furlong/base/process.h"
#include "furlong/model/plan.h"

namespace furlong {

namespace {

constexpr double kGigabyte = 1e9;
constexpr double kBatchBytesPerToken = 20;  // token, target and weight: 8 + 8 + 4

void check_device(const std::string& device) {
  if (device == "cpu") return;
  const int64_t devices = at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0;
  const c10::Device asked(device);
  if (asked.index() < devices && devices > 0) return;
  throw ConfigError(
      fmt::format("key 'device' is '{}', this program sees {} CUDA devices; see furlong doctor", device, devices));
}

void check_memory(const TrainConfig& config) {
  const auto memory = static_cast<double>(machine_memory_bytes());
  for (size_t i = 0; i < config.stages.size(); ++i) {
    const StageConfig& stage = config.stages[i];
    PlanRequest request;
    request.context = stage.context;
    request.batch = stage.micro_rows > 0 ? stage.micro_rows : stage.rows;
    request.bf16 = config.compute == "bf16";
    request.recompute = config.recompute;
    const TrainingBytes bytes = plan_training(config.model, request);
    const double model = bytes.weights + bytes.gradients + bytes.optimizer;
    if (model > memory) {
      throw ConfigError(fmt::format(
          "key 'model': weights, gradients and moments need {:.1f} GB, this machine has {:.1f} GB of memory",
          model / kGigabyte, memory / kGigabyte));
    }
    const double batch = kBatchBytesPerToken * static_cast<double>(stage.tokens_per_step());
    if (model + 0.5 * bytes.activations + batch > memory) {
      throw ConfigError(
          fmt::format("key 'stages.{}': {} rows of {} tokens in one forward need about {:.1f} GB with the model, this "
                      "machine has {:.1f} GB of memory; lower micro_rows, rows or context",
                      i, request.batch, request.context, (bytes.total() + batch) / kGigabyte, memory / kGigabyte));
    }
  }
}

}  // namespace

void check_machine(const TrainConfig& config) {
  check_device(config.device);
  if (config.device == "cpu") check_memory(config);
}

}  // namespace furlong
