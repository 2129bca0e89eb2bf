#pragma once

// Memory that nobody has written yet as NaN: a kernel that reads its workspace or result before writing it shows.

#include <ATen/Context.h>
#include <malloc.h>

namespace furlong::testing {

/// While it lives, fresh memory of malloc holds bytes of 0xff (NaN in fp32 and bf16), and so do tensors of at::empty.
/// The address sanitizer has an allocator of its own: there only tensors are filled.
class PoisonedMemory {
 public:
  PoisonedMemory() {
    // glibc fills with the complement of the low byte: 0xff. A whole number of 0 would mean "off".
    mallopt(M_PERTURB, 0x100);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    at::globalContext().setDeterministicFillUninitializedMemory(true);
  }
  ~PoisonedMemory() {
    mallopt(M_PERTURB, 0);
    at::globalContext().setDeterministicAlgorithms(false, false);
  }
  PoisonedMemory(const PoisonedMemory&) = delete;
  PoisonedMemory& operator=(const PoisonedMemory&) = delete;
};

}  // namespace furlong::testing
