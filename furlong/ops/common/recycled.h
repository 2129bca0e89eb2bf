#pragma once

// Memory of large tensors that live for a part of a training step, again and again: what a forward keeps for its
// gradient, and gradients on their way to the operator before. The C library gives such blocks back to the system, and
// the system clears every page of the next one.
//
// Freed blocks wait for a request of nearly their size. A request that none of them fits first gives as many bytes back
// to the system as it takes, so that blocks in use and waiting together never exceed the most that was in use at once
// (but for the eighth by which a block may be too large). At most kMostIdleBytes wait.

#include <ATen/core/Tensor.h>

namespace furlong {

constexpr int64_t kMostIdleBytes = int64_t{256} << 20;

/// at::empty of a contiguous CPU tensor; from 1 MB on in recycled memory, on huge pages where the system has them.
at::Tensor empty_recycled(at::IntArrayRef sizes, at::ScalarType dtype);

struct RecycledBytes {
  int64_t in_use, idle;
};
RecycledBytes recycled_bytes();

}  // namespace furlong
