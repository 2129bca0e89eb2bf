// What the row kernels share, on top of Google Highway: loads and stores of fp32 and bf16 as fp32 vectors, and the
// transcendental functions of the activations. Included once per target, after "hwy/foreach_target.h":
//
//   #include "furlong/ops/common/simd_targets.h"
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "furlong/ops/norm/cpu.cpp"
//   #include "hwy/foreach_target.h"
//   #include "furlong/ops/common/simd-inl.h"

#include <c10/util/BFloat16.h>
#include <hwy/highway.h>

#if defined(FURLONG_OPS_COMMON_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURLONG_OPS_COMMON_SIMD_INL_H_
#undef FURLONG_OPS_COMMON_SIMD_INL_H_
#else
#define FURLONG_OPS_COMMON_SIMD_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace furlong {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;

/// How much of a vector is meant: all of it, or the first `count` lanes at the end of a row (others load as zero).
struct Full {};
struct Partial {
  size_t count;
};

/// body(index, Full) for every whole vector of a row, then body(index, Partial) for its rest.
template <class Body>
HWY_INLINE void for_each_vector(int64_t size, const Body& body) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(DF()));
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes) body(i, Full{});
  if (i < size) body(i, Partial{static_cast<size_t>(size - i)});
}

HWY_INLINE VF load(const float* from, Full) {
  return hn::LoadU(DF(), from);
}

HWY_INLINE VF load(const c10::BFloat16* from, Full) {
  const hn::Rebind<uint16_t, DF> d16;
  const hn::Rebind<uint32_t, DF> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(DF(), hn::ShiftLeft<16>(bits));
}

HWY_INLINE void store(VF v, float* to, Full) {
  hn::StoreU(v, DF(), to);
}

// The upper half of each lane, rounded to nearest even as LibTorch does (Highway 1.0.3's own conversion truncates), in
// the lower half of the result. A NaN gets a mantissa bit, so that it stays one.
HWY_INLINE auto bf16_bits(VF v) {
  const hn::Rebind<uint32_t, DF> d32;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7FFF)));
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x400000));
  return hn::ShiftRight<16>(hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(v)), quiet, rounded));
}

HWY_INLINE void store(VF v, c10::BFloat16* to, Full) {
  const hn::Rebind<uint16_t, DF> d16;
  hn::StoreU(hn::TruncateTo(d16, bf16_bits(v)), d16, reinterpret_cast<uint16_t*>(to));
}

template <typename T>
HWY_INLINE VF load(const T* from, Partial part) {
  T buffer[HWY_MAX_BYTES / sizeof(float)] = {};
  for (size_t i = 0; i < part.count; ++i) buffer[i] = from[i];
  return load(buffer, Full{});
}

template <typename T>
HWY_INLINE void store(VF v, T* to, Partial part) {
  T buffer[HWY_MAX_BYTES / sizeof(float)];
  store(v, buffer, Full{});
  for (size_t i = 0; i < part.count; ++i) to[i] = buffer[i];
}

HWY_INLINE float sum_of_lanes(VF v) {
  return hn::GetLane(hn::SumOfLanes(DF(), v));
}

/// `v` rounded to T and widened again.
HWY_INLINE VF round_to(VF v, float) {
  return v;
}
HWY_INLINE VF round_to(VF v, c10::BFloat16) {
  return hn::BitCast(DF(), hn::ShiftLeft<16>(bf16_bits(v)));
}

// In the functions below clamps keep NaN: x86 min and max return their second operand when either is NaN.

/// e^x to 2 ulp for x in [-87.3, 88]; 0 below, and above it stays at the value of the border.
HWY_INLINE VF exp_of(VF x) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  const auto vanishes = hn::Lt(x, hn::Set(d, -87.3f));
  x = hn::Max(hn::Set(d, -87.3f), hn::Min(hn::Set(d, 88.0f), x));
  const VF n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504f)));
  VF r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);  // ln 2 in two parts
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  // Cephes expf: e^r = 1 + r + r^2 p(r) for |r| <= ln 2 / 2.
  VF p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  p = hn::MulAdd(p, hn::Mul(r, r), hn::Add(r, hn::Set(d, 1.0f)));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  return hn::IfThenZeroElse(vanishes, hn::Mul(p, hn::BitCast(d, exponent)));
}

/// 1 / (1 + e^-x); 0 below -88, where e^-x would leave the range.
HWY_INLINE VF sigmoid_of(VF x) {
  const DF d;
  const VF one = hn::Set(d, 1.0f);
  const VF value = hn::Div(one, hn::Add(one, exp_of(hn::Neg(x))));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -88.0f)), value);
}

/// tanh to 3 ulp: the odd rational of degree 13 over 6 that Eigen uses; +-1 from |x| = 7.9 on.
HWY_INLINE VF tanh_of(VF x) {
  const DF d;
  x = hn::Max(hn::Set(d, -7.90531110763549805f), hn::Min(hn::Set(d, 7.90531110763549805f), x));
  const VF x2 = hn::Mul(x, x);
  VF p = hn::Set(d, -2.76076847742355e-16f);
  p = hn::MulAdd(p, x2, hn::Set(d, 2.00018790482477e-13f));
  p = hn::MulAdd(p, x2, hn::Set(d, -8.60467152213735e-11f));
  p = hn::MulAdd(p, x2, hn::Set(d, 5.12229709037114e-08f));
  p = hn::MulAdd(p, x2, hn::Set(d, 1.48572235717979e-05f));
  p = hn::MulAdd(p, x2, hn::Set(d, 6.37261928875436e-04f));
  p = hn::MulAdd(p, x2, hn::Set(d, 4.89352455891786e-03f));
  VF q = hn::Set(d, 1.19825839466702e-06f);
  q = hn::MulAdd(q, x2, hn::Set(d, 1.18534705686654e-04f));
  q = hn::MulAdd(q, x2, hn::Set(d, 2.26843463243900e-03f));
  q = hn::MulAdd(q, x2, hn::Set(d, 4.89352518554385e-03f));
  return hn::Div(hn::Mul(x, p), q);
}

}  // namespace HWY_NAMESPACE
}  // namespace furlong
HWY_AFTER_NAMESPACE();

#endif  // FURLONG_OPS_COMMON_SIMD_INL_H_
