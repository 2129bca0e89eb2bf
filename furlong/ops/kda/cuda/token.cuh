#pragma once

#include "furlong/ops/kda/cuda/args.h"

namespace furlong::kda::cuda {

/// Token by token in fp32 for any head size up to 256 and any element type. One launch, no workspace.
int launch_token_forward(const ForwardArgs& args);

}  // namespace furlong::kda::cuda
