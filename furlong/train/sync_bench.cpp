// Counts where one training step makes the host wait for the GPU, by phase and place.
//
//   sync_bench MODEL.toml        one JSON line; without a GPU a line that starts with SKIP
//
// A wait is a scalar read, a copy between host and device, or a call whose result size depends on the data. Each is
// found by an observer of every operator call; the place is the first function of this project on the call stack.

#include <ATen/Context.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/roll.h>
#include <ATen/record_function.h>
#include <c10/util/Backtrace.h>
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#include "furlong/base/json.h"
#include "furlong/model/decoder.h"
#include "furlong/ops/cross_entropy/cross_entropy.h"
#include "furlong/ops/moe/layer.h"
#include "furlong/train/step.h"

namespace furlong {
namespace {

/// The waits since the last clear, by operator and place.
struct Waits {
  std::mutex mutex;  // backward runs on a thread of its own
  std::map<std::string, int64_t> by_place;
};

Waits& waits() {
  static Waits value;
  return value;
}

bool waits_for_device(const std::string& name, c10::ArrayRef<const c10::IValue> inputs) {
  const auto on_gpu = [&](size_t i) {
    return i < inputs.size() && inputs[i].isTensor() && inputs[i].toTensor().is_cuda();
  };
  if (name == "aten::_local_scalar_dense" || name == "aten::nonzero") return on_gpu(0);
  const bool is_copy = name == "aten::copy_" && inputs.size() > 1 && inputs[1].isTensor();
  return is_copy && on_gpu(0) != on_gpu(1);
}

std::string place() {
  std::istringstream frames(c10::get_backtrace());
  std::string frame;
  while (std::getline(frames, frame)) {
    const size_t at = frame.find("furlong::");
    if (at == std::string::npos || frame.find("anonymous namespace)::place") != std::string::npos ||
        frame.find("::on_enter") != std::string::npos) {
      continue;
    }
    return frame.substr(at, frame.find_first_of("(<+", at) - at);
  }
  return "outside of this project's code";
}

std::unique_ptr<at::ObserverContext> on_enter(const at::RecordFunction& function) {
  const std::string name = function.name();
  if (waits_for_device(name, function.inputs())) {
    const std::string where = name + " in " + place();
    const std::scoped_lock lock(waits().mutex);
    ++waits().by_place[where];
  }
  return nullptr;
}

/// What happened since the last call, as {"count", "places"}.
OrderedJson take_waits() {
  const std::scoped_lock lock(waits().mutex);
  int64_t count = 0;
  OrderedJson places = OrderedJson::object();
  for (const auto& [where, times] : waits().by_place) {
    places[where] = times;
    count += times;
  }
  waits().by_place.clear();
  return {{"count", count}, {"places", places}};
}

void run(const std::string& path) {
  const ModelConfig config = ModelConfig::load(path);
  Decoder decoder(config);
  decoder.initialize(1, at::kFloat, at::kCUDA, true);
  for (MoeLayer* layer : decoder.moe_layers()) {
    if (layer != nullptr) layer->enable_balancing(1000);
  }
  Optimizer optimizer(decoder.params(), OptimizerConfig{});
  Monitor monitor{MonitorConfig{}};
  constexpr int64_t kRows = 4, kContext = 64;
  Batch batch;
  batch.tokens_N = at::randint(config.vocab_size, {kRows * kContext}, at::kLong).to(at::kCUDA);
  batch.targets_N = at::roll(batch.tokens_N, -1);
  batch.weight_N = at::ones({kRows * kContext}, batch.tokens_N.options().dtype(at::kFloat));
  batch.layout = SequenceLayout::from_lengths(std::vector<int64_t>(kRows, kContext), at::kCUDA);
  batch.num_targets = kRows * kContext;
  take_step(decoder, optimizer, monitor, {batch}, {.lr = 1e-3, .clip = 1.0});  // first use of every kernel

  const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(on_enter).needsInputs(true));
  ForwardRecord record;
  ForwardOptions options;
  options.training = true;
  options.record = &record;
  OrderedJson line = {{"program", "sync_bench"}};
  const at::Tensor hidden_ND = decoder.forward(batch.tokens_N, batch.layout, nullptr, options);
  line["forward"] = take_waits();
  const auto [loss, nll_N] = linear_cross_entropy(hidden_ND, decoder.head_weight(), batch.targets_N, batch.weight_N);
  line["loss"] = take_waits();
  loss.backward();
  line["backward"] = take_waits();
  take_step(decoder, optimizer, monitor, {batch}, {.lr = 1e-3, .clip = 1.0});
  line["whole_step"] = take_waits();
  at::removeCallback(handle);
  fmt::print("{}\n", line.dump());
}

}  // namespace
}  // namespace furlong

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "sync_bench: needs one argument, a model config (configs/model/nano.toml)\n");
    return 2;
  }
  if (!at::hasCUDA()) {
    std::printf("SKIP: no GPU here\n");
    return 0;
  }
  try {
    furlong::run(argv[1]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sync_bench: %s\n", error.what());
    return 1;
  }
}
