// Compiled once for every target that the kernels are compiled for; dispatch picks the best one the CPU has.

#include "furlong/ops/common/simd_target.h"

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/common/simd_target.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace furlong {
namespace HWY_NAMESPACE {
namespace {

const char* target_name() {
  return hwy::TargetName(HWY_TARGET);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace furlong
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furlong {
namespace {
HWY_EXPORT(target_name);
}  // namespace

const char* simd_target() {
  return HWY_DYNAMIC_DISPATCH(target_name)();
}

}  // namespace furlong
#endif
