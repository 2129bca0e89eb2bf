#pragma once

// One optimizer step over all its micro-batches.
//   N packed tokens of a micro-batch

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "furlong/data/loader.h"
#include "furlong/model/decoder.h"
#include "furlong/optim/optimizer.h"
#include "furlong/train/monitor.h"
#include "furlong/train/position_loss.h"
#include "furlong/train/statistics.h"

namespace furlong {

struct StepOptions {
  double lr = 0.0;
  double clip = 0.0;
  bool recompute = false;
  bool position_loss = false;
};

struct StepOutcome {
  double loss = 0.0;       // nats per target
  double grad_norm = 0.0;  // before clipping
  int64_t tokens = 0;
  int64_t targets = 0;
  Verdict verdict;
  StepStatistics statistics;
  PositionLoss position_loss;
  // Per layer, after the update; unset where there is no router.
  std::vector<std::optional<double>> bias_range, bin_mass;
};

/// The gradient of the mean loss over the targets of all micro-batches together, left in the parameters' grad();
/// statistics and balance histograms are counted. Gradients that were there are added to. `fault`, when set, says why
/// the forward pass broke off (a NumericError).
struct LossAndFault {
  double loss = 0.0;
  std::string fault;
};
LossAndFault accumulate_gradients(const Decoder& decoder, const std::vector<Batch>& batches, const StepOptions& options,
                                  StepOutcome& outcome);

/// Gradients, clip, verdict, optimizer step and balance update; or, for a skipped step, none of the last two.
StepOutcome take_step(const Decoder& decoder, Optimizer& optimizer, Monitor& monitor, const std::vector<Batch>& batches,
                      const StepOptions& options);

}  // namespace furlong
