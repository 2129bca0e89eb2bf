// MXFP4 codes and scales as fp32 vectors. Included once for each SIMD target, after simd-inl.h.

#if defined(FURLONG_OPS_MXFP4_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURLONG_OPS_MXFP4_CODES_INL_H_
#undef FURLONG_OPS_MXFP4_CODES_INL_H_
#else
#define FURLONG_OPS_MXFP4_CODES_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "furlong/ops/common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furlong {
namespace HWY_NAMESPACE {

using DU = hn::Rebind<uint32_t, DF>;
using VU = hn::Vec<DU>;

/// 2^(byte - 127): the byte is the exponent field, but for 0 (2^-127, not a normal number) and 255 (NaN).
HWY_INLINE float mx_scale(uint8_t byte) {
  if (byte == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(std::max(static_cast<uint32_t>(byte) << 23, uint32_t{1} << 22));
}

/// Values of the codes in the low 4 bits of each lane; what stands above them is ignored.
class CodeTable {
#if HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_AVX2
  // The permutation reads the low 4 (AVX2: 3) bits of an index; Highway's debug builds insist on clean ones.
  static HWY_INLINE auto indices(VU codes) {
    const hn::RebindToSigned<DF> di;
#if HWY_IS_DEBUG_BUILD
    codes = hn::And(codes, hn::Set(DU(), static_cast<uint32_t>(hn::Lanes(DU())) - 1));
#endif
    return hn::IndicesFromVec(DF(), hn::BitCast(di, codes));
  }

  static constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  VF values_;

 public:
  CodeTable() : values_(hn::LoadU(DF(), kValues)) {}
#else
 public:
#endif

  HWY_INLINE VF operator()(VU codes) const {
    const DF d;
    const DU du;
#if HWY_TARGET <= HWY_AVX3
    return hn::TableLookupLanes(values_, indices(codes));
#else
    const auto sign = hn::And(hn::ShiftLeft<28>(codes), hn::Set(du, 0x80000000u));
#if HWY_TARGET == HWY_AVX2
    const auto magnitude = hn::BitCast(du, hn::TableLookupLanes(values_, indices(codes)));
#else
    // From code 2 on, exponent and mantissa stand in place, 126 too low; 0 and 1 are 0 and 0.5.
    const hn::RebindToSigned<DF> di;
    const auto code = hn::And(codes, hn::Set(du, 7u));
    const auto normal = hn::Add(hn::ShiftLeft<22>(code), hn::Set(du, 126u << 23));
    const auto small = hn::Mul(hn::ConvertTo(d, hn::BitCast(di, code)), hn::Set(d, 0.5f));
    const auto is_small = hn::Lt(hn::BitCast(di, code), hn::Set(di, 2));
    const auto magnitude = hn::IfThenElse(hn::RebindMask(du, is_small), hn::BitCast(du, small), normal);
#endif
    return hn::BitCast(d, hn::Or(magnitude, sign));
#endif
  }
};

/// The 32 codes of a block's 16 bytes, in the order of elements.
HWY_INLINE void unpack_block(const uint8_t* bytes, uint8_t* HWY_RESTRICT codes) {
#if HWY_TARGET == HWY_SCALAR
  for (int i = 0; i < 16; ++i) {
    codes[2 * i] = bytes[i] & 15;
    codes[2 * i + 1] = static_cast<uint8_t>(bytes[i] >> 4);
  }
#else
  const hn::FixedTag<uint8_t, 16> d8;
  const auto both = hn::LoadU(d8, bytes);
  const auto low = hn::And(both, hn::Set(d8, 15)), high = hn::ShiftRight<4>(both);
  hn::StoreU(hn::InterleaveLower(d8, low, high), d8, codes);
  hn::StoreU(hn::InterleaveUpper(d8, low, high), d8, codes + 16);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace furlong
HWY_AFTER_NAMESPACE();

#endif  // FURLONG_OPS_MXFP4_CODES_INL_H_
