#pragma once

// What a config asks of this machine, before anything is allocated.

#include "furlong/train/config.h"

namespace furlong {

/// ConfigError when the device is not there, or when a run on the CPU cannot fit in this machine's memory. Weights,
/// gradients and moments are counted exactly; of activations, which are an estimate, only half, so that no run that
/// would fit is refused.
void check_machine(const TrainConfig& config);

}  // namespace furlong
