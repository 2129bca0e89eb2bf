#pragma once

// The per-token kernel of the loss, free of tensors.

#include <cstdint>

namespace furlong {

/// A chunk of logits: contiguous rows of `size`, fp32 or bf16. `nll` gets the negative log-likelihood of each row's
/// target, in nats.
struct CrossEntropyRows {
  int64_t size = 0;
  void* logits = nullptr;
  const int64_t* target = nullptr;
  const float* weight = nullptr;
  float* nll = nullptr;
};

struct CrossEntropyKernels {
  using Kernel = void (*)(const CrossEntropyRows& rows, int64_t first, int64_t last);
  /// Rows [first, last) of nll; reads logits only.
  Kernel loss;
  /// The same, and replaces each row of logits by its gradient weight (softmax - onehot(target)).
  Kernel loss_and_gradient;
};

/// The kernels for this processor.
CrossEntropyKernels cross_entropy_kernels(bool bf16);

}  // namespace furlong
