#pragma once

// Runs one layer under autograd, keeping its whole graph or only its inputs.

#include "furlong/model/decoder_layer.h"

namespace furlong {

/// The stream after the layer. `recompute`: only the stream's tensors (and the chosen expert ids) are kept; backward
/// runs the layer again. Gradients are the same to the bit either way: in both, what a layer sends back to each of its
/// inputs is summed inside the layer first.
ResidualStream run_layer(const DecoderLayer& layer, const ResidualStream& stream, int64_t attnres_block_size,
                         const SequenceLayout& layout, const ForwardContext& context, bool recompute);

}  // namespace furlong
