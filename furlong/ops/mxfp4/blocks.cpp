// Quantisation kernels over blocks.
//   byte = exponent field of amax - 2   v = min(|x| 2^(127 - byte), 6)
//   steps of 0.5 below 2, of 1 below 4, of 2 above: code = round(v / step) + (0, 2, 4), ties to even

#include "furlong/ops/mxfp4/blocks.h"

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/mxfp4/blocks.cpp"
#include <hwy/foreach_target.h>

#include "furlong/ops/mxfp4/codes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furlong {
namespace HWY_NAMESPACE {
namespace {

constexpr int64_t kBytes = kMxBlock / 2;

// Values are exact in bf16, too (or infinite): their upper half is all there is.
HWY_INLINE void store_exact(VF v, c10::BFloat16* to) {
  const hn::Rebind<uint16_t, DF> d16;
  hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(hn::BitCast(DU(), v))), d16, reinterpret_cast<uint16_t*>(to));
}
HWY_INLINE void store_exact(VF v, float* to) {
  store(v, to, Full{});
}

template <typename T>
void dequantize(const uint8_t* packed, const uint8_t* scale, void* y, int64_t count) {
  const hn::Rebind<uint8_t, DF> d8;
  const CodeTable values;
  T* to = static_cast<T*>(y);
  uint8_t codes[kMxBlock];
  for (int64_t block = 0; block < count; ++block, to += kMxBlock) {
    unpack_block(packed + block * kBytes, codes);
    const VF factor = hn::Set(DF(), mx_scale(scale[block]));
    for (size_t i = 0; i < kMxBlock; i += hn::Lanes(DF())) {
      store_exact(hn::Mul(values(hn::PromoteTo(DU(), hn::LoadU(d8, codes + i))), factor), to + i);
    }
  }
}

/// Bits of the largest magnitude; integers order as the magnitudes do, with infinity and NaN on top.
template <typename T>
HWY_INLINE uint32_t largest_bits(const T* x) {
  const hn::RebindToSigned<DF> di;
  auto largest = hn::Zero(di);
  for (size_t i = 0; i < kMxBlock; i += hn::Lanes(DF())) {
    largest = hn::Max(largest, hn::BitCast(di, hn::Abs(load(x + i, Full{}))));
  }
  return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest)));
}

constexpr uint32_t kInfinityBits = 0x7F800000;

HWY_INLINE uint8_t scale_byte(uint32_t amax_bits, Mxfp4Scale rule) {
  if (amax_bits == 0) return 127;
  // Even: adding an eighth of the mantissa's range carries into the exponent from 1.75 on.
  const uint32_t rounded = rule == Mxfp4Scale::kEven ? amax_bits + (1u << 21) : amax_bits;
  return static_cast<uint8_t>(std::max<int>(static_cast<int>(rounded >> 23) - 2, 0));
}

/// One vector of magnitudes on the grid: codes = rounded + offset, values = rounded * step.
struct Grid {
  VF rounded, step, offset;
};

HWY_INLINE Grid to_grid(VF x, VF inverse) {
  const DF d;
  const VF v = hn::Min(hn::Mul(hn::Abs(x), inverse), hn::Set(d, 6.0f));
  const auto below2 = hn::Lt(v, hn::Set(d, 2.0f)), below4 = hn::Lt(v, hn::Set(d, 4.0f));
  const auto choose = [&](float a, float b, float c) HWY_ATTR {
    return hn::IfThenElse(below2, hn::Set(d, a), hn::IfThenElse(below4, hn::Set(d, b), hn::Set(d, c)));
  };
  return {hn::Round(hn::Mul(v, choose(2.0f, 1.0f, 0.5f))), choose(0.5f, 1.0f, 2.0f), choose(0.0f, 2.0f, 4.0f)};
}

HWY_INLINE VF inverse_scale(uint8_t byte) {
  return hn::Set(DF(), std::bit_cast<float>((254u - byte) << 23));
}

template <typename T>
int64_t quantize(const void* x, Mxfp4Scale rule, uint8_t* packed, uint8_t* scale, int64_t count) {
  const hn::RebindToSigned<DF> di;
  const hn::Rebind<uint8_t, DF> d8;
  const T* from = static_cast<const T*>(x);
  uint8_t codes[kMxBlock];
  for (int64_t block = 0; block < count; ++block, from += kMxBlock, packed += kBytes) {
    const uint32_t amax = largest_bits(from);
    if (amax >= kInfinityBits) return block;
    scale[block] = scale_byte(amax, rule);
    const VF inverse = inverse_scale(scale[block]);
    for (size_t i = 0; i < kMxBlock; i += hn::Lanes(DF())) {
      const VF v = load(from + i, Full{});
      const Grid grid = to_grid(v, inverse);
      const auto sign = hn::ShiftLeft<3>(hn::ShiftRight<31>(hn::BitCast(DU(), v)));
      const auto code = hn::Or(hn::ConvertTo(di, hn::Add(grid.rounded, grid.offset)), hn::BitCast(di, sign));
      hn::StoreU(hn::DemoteTo(d8, code), d8, codes + i);
    }
    for (int64_t i = 0; i < kBytes; ++i) packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
  return -1;
}

template <typename T>
void fake_quantize(const void* x, Mxfp4Scale rule, void* y, int64_t count) {
  const T* from = static_cast<const T*>(x);
  T* to = static_cast<T*>(y);
  for (int64_t block = 0; block < count; ++block, from += kMxBlock, to += kMxBlock) {
    const uint32_t amax = largest_bits(from);
    const bool finite = amax < kInfinityBits;
    const uint8_t byte = finite ? scale_byte(amax, rule) : 127;
    const VF inverse = inverse_scale(byte), factor = hn::Set(DF(), mx_scale(finite ? byte : 255));
    for (size_t i = 0; i < kMxBlock; i += hn::Lanes(DF())) {
      const VF v = load(from + i, Full{});
      const Grid grid = to_grid(v, inverse);
      store(hn::CopySign(hn::Mul(hn::Mul(grid.rounded, grid.step), factor), v), to + i, Full{});
    }
  }
}

template <typename T>
Mxfp4BlockKernels kernels_of() {
  return {dequantize<T>, quantize<T>, fake_quantize<T>};
}

Mxfp4BlockKernels kernels_for(bool bf16) {
  return bf16 ? kernels_of<c10::BFloat16>() : kernels_of<float>();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace furlong
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furlong {

HWY_EXPORT(kernels_for);

Mxfp4BlockKernels mxfp4_block_kernels(bool bf16) {
  return HWY_DYNAMIC_DISPATCH(kernels_for)(bf16);
}

}  // namespace furlong
#endif  // HWY_ONCE
