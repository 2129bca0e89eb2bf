// Per-token kernels of the loss. Statistics in fp32: the maximum, then the sum of e^(x - maximum) in several partial
// sums. The gradient takes the exponential again instead of storing it, so that bf16 logits are rounded once.

#include "furlong/ops/cross_entropy/rows.h"

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/cross_entropy/rows.cpp"
#include <hwy/foreach_target.h>

#include "furlong/ops/common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furlong {
namespace HWY_NAMESPACE {
namespace {  // other operators have functions of the same names

/// The elements that fill whole vectors; the rest of a row is done one by one, since lanes past its end would count as
/// e^0 in the sums.
HWY_INLINE int64_t whole_vectors(int64_t size) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(DF()));
  return size / lanes * lanes;
}

template <typename T>
HWY_INLINE float maximum(const T* x, int64_t size) {
  const int64_t whole = whole_vectors(size);
  VF top = hn::Set(DF(), -std::numeric_limits<float>::infinity());
  for_each_vector(whole, [&](int64_t i, auto part) HWY_ATTR { top = hn::Max(top, load(x + i, part)); });
  float result = hn::GetLane(hn::MaxOfLanes(DF(), top));
  for (int64_t i = whole; i < size; ++i) result = std::max(result, static_cast<float>(x[i]));
  return result;
}

template <typename T>
HWY_INLINE float sum_of_exp(const T* x, int64_t size, float top) {
  const int64_t whole = whole_vectors(size);
  const VF top_all = hn::Set(DF(), top);
  VF sum = hn::Zero(DF());
  for_each_vector(
      whole, [&](int64_t i, auto part) HWY_ATTR { sum = hn::Add(sum, exp_of(hn::Sub(load(x + i, part), top_all))); });
  float result = sum_of_lanes(sum);
  for (int64_t i = whole; i < size; ++i) result += std::exp(static_cast<float>(x[i]) - top);
  return result;
}

template <typename T, bool kGradient>
void loss_rows(const CrossEntropyRows& rows, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    T* x = static_cast<T*>(rows.logits) + row * rows.size;
    const float top = maximum(x, rows.size);
    const float sum = sum_of_exp(x, rows.size, top);
    const int64_t target = rows.target[row];
    rows.nll[row] = std::log(sum) + top - static_cast<float>(x[target]);
    if constexpr (kGradient) {
      const float at_target = rows.weight[row] * (std::exp(static_cast<float>(x[target]) - top) / sum - 1.0f);
      const VF top_all = hn::Set(DF(), top);
      const VF scale = hn::Set(DF(), rows.weight[row] / sum);
      for_each_vector(rows.size, [&](int64_t i, auto part) HWY_ATTR {
        store(hn::Mul(exp_of(hn::Sub(load(x + i, part), top_all)), scale), x + i, part);
      });
      x[target] = static_cast<T>(at_target);
    }
  }
}

CrossEntropyKernels kernels_for(bool bf16) {
  if (bf16) return {loss_rows<c10::BFloat16, false>, loss_rows<c10::BFloat16, true>};
  return {loss_rows<float, false>, loss_rows<float, true>};
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace furlong
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furlong {

HWY_EXPORT(kernels_for);

CrossEntropyKernels cross_entropy_kernels(bool bf16) {
  return HWY_DYNAMIC_DISPATCH(kernels_for)(bf16);
}

}  // namespace furlong
#endif  // HWY_ONCE
