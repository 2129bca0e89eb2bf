#include "furlong/train/step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "furlong/base/error.h"
#include "furlong/ops/cross_entropy/cross_entropy.h"
#include "furlong/ops/moe/layer.h"

namespace furlong {

namespace {

Batch on_device(const Batch& batch, at::Device device) {
  if (device.is_cpu()) return batch;
  std::vector<int64_t> lengths(batch.layout.num_sequences());
  for (size_t b = 0; b < lengths.size(); ++b) lengths[b] = batch.layout.length(static_cast<int64_t>(b));
  return {batch.tokens_N.to(device), batch.targets_N.to(device), batch.weight_N.to(device),
          SequenceLayout::from_lengths(lengths, device), batch.num_targets};
}

/// Replaces the bias of every router by its quantile, or forgets the counts of a skipped step.
void settle_balance(const Decoder& decoder, bool taken) {
  const at::NoGradGuard no_grad;
  for (MoeLayer* layer : decoder.moe_layers()) {
    if (layer == nullptr || layer->balancer() == nullptr) continue;
    if (taken) {
      layer->balancer()->update(layer->correction_bias_E());
    } else {
      layer->balancer()->discard();
    }
  }
}

void record_bias(const Decoder& decoder, StepOutcome& outcome) {
  const at::NoGradGuard no_grad;
  const std::vector<MoeLayer*> layers = decoder.moe_layers();
  outcome.bias_range.resize(layers.size());
  outcome.bin_mass.resize(layers.size());
  std::vector<at::Tensor> ranges;
  for (MoeLayer* layer : layers) {
    if (layer == nullptr) continue;
    const at::Tensor& bias_E = layer->correction_bias_E();
    ranges.push_back(bias_E.max().sub(bias_E.min()));
  }
  if (ranges.empty()) return;
  const at::Tensor all = at::stack(ranges).to(at::kCPU, at::kDouble);
  const double* range = all.const_data_ptr<double>();
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i] == nullptr) continue;
    outcome.bias_range[i] = *range++;
    if (layers[i]->balancer() != nullptr) outcome.bin_mass[i] = layers[i]->balancer()->last_bin_mass();
  }
}

}  // namespace

LossAndFault accumulate_gradients(const Decoder& decoder, const std::vector<Batch>& batches, const StepOptions& options,
                                  StepOutcome& outcome) {
  const at::Device device = decoder.device();
  int64_t targets = 0;
  for (const Batch& batch : batches) targets += batch.num_targets;
  const double weight = 1.0 / static_cast<double>(std::max<int64_t>(targets, 1));
  at::Tensor loss_sum = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
  try {
    for (const Batch& host_batch : batches) {
      const Batch batch = on_device(host_batch, device);
      ForwardRecord record;
      ForwardOptions forward;
      forward.training = true;
      forward.recompute = options.recompute;
      forward.record = &record;
      const at::Tensor hidden_ND = decoder.forward(batch.tokens_N, batch.layout, nullptr, forward);
      const auto [loss, nll_N] =
          linear_cross_entropy(hidden_ND, decoder.head_weight(), batch.targets_N, batch.weight_N.mul(weight));
      loss.backward();
      loss_sum.add_(loss.detach());
      outcome.statistics.add(record, batch.layout.num_tokens());
      if (options.position_loss) outcome.position_loss.add(nll_N, batch.weight_N, batch.layout.offsets_host());
    }
  } catch (const NumericError& error) {
    return {std::numeric_limits<double>::quiet_NaN(), error.what()};
  }
  return {loss_sum.item<double>(), ""};
}

StepOutcome take_step(const Decoder& decoder, Optimizer& optimizer, Monitor& monitor, const std::vector<Batch>& batches,
                      const StepOptions& options) {
  StepOutcome outcome;
  for (const Batch& batch : batches) {
    outcome.tokens += batch.layout.num_tokens();
    outcome.targets += batch.num_targets;
  }
  optimizer.zero_grad();
  const LossAndFault result = accumulate_gradients(decoder, batches, options, outcome);
  outcome.loss = result.loss;
  outcome.grad_norm =
      result.fault.empty() ? clip_grad_norm(decoder.params(), options.clip) : std::numeric_limits<double>::quiet_NaN();
  outcome.verdict = monitor.judge(outcome.loss, outcome.grad_norm, result.fault);
  if (outcome.verdict.take()) optimizer.step(options.lr);
  settle_balance(decoder, outcome.verdict.take());
  outcome.statistics.finish();
  record_bias(decoder, outcome);
  return outcome;
}

}  // namespace furlong
