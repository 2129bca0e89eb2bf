#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "furlong/ops/common/param_spec.h"

namespace furlong {

/// The initial value of a parameter, fp32 on the CPU. Element i depends on (seed, name, i) alone: the same for any
/// number of threads, any order of parameters and any other part of the architecture.
at::Tensor draw_initial(const ParamSpec& spec, uint64_t seed);

}  // namespace furlong
