#pragma once

// Runs a test body once for every instruction set that this processor has, so that the kernels of lesser processors are
// tested too.

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cstdint>

namespace furlong::testing {

template <typename Body>
void on_every_simd_target(const Body& body) {
  for (int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    body();
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }
}

}  // namespace furlong::testing
