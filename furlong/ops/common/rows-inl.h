// Rows of fp32 or bf16 in memory, as fp32 in registers and scratch, and back. Included once for each SIMD target.

#if defined(FURLONG_OPS_COMMON_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURLONG_OPS_COMMON_ROWS_INL_H_
#undef FURLONG_OPS_COMMON_ROWS_INL_H_
#else
#define FURLONG_OPS_COMMON_ROWS_INL_H_
#endif

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace furlong::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class D>
HWY_INLINE hn::Vec<D> load_f32(D f32, const float* from) {
  return hn::LoadU(f32, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load_f32(D f32, const c10::BFloat16* from) {
  const hn::RebindToUnsigned<D> u32;
  const hn::Rebind<uint16_t, D> u16;
  const auto bits = hn::PromoteTo(u32, hn::LoadU(u16, reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(f32, hn::ShiftLeft<16>(bits));
}

template <class D>
HWY_INLINE void store_f32(D f32, hn::Vec<D> value, float* to) {
  hn::StoreU(value, f32, to);
}

/// Rounds to the nearest, ties to even; NaN stays NaN.
template <class D>
HWY_INLINE void store_f32(D /*f32*/, hn::Vec<D> value, c10::BFloat16* to) {
  const hn::RebindToUnsigned<D> u32;
  const hn::Rebind<uint16_t, D> u16;
  const auto bits = hn::BitCast(u32, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u32, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(u32, 0x7FFF)));
  const auto chosen = hn::IfThenElse(hn::RebindMask(u32, hn::IsNaN(value)), hn::Set(u32, 0x7FC00000), rounded);
  const hn::RebindToSigned<D> i32;
  hn::StoreU(hn::DemoteTo(u16, hn::BitCast(i32, hn::ShiftRight<16>(chosen))), u16, reinterpret_cast<uint16_t*>(to));
}

/// to [padded_rows, padded_columns] = from [rows, columns], zero elsewhere. `stride` counts elements between rows.
template <typename T>
HWY_INLINE void load_rows(const T* from, int64_t stride, int64_t rows, int64_t columns, float* HWY_RESTRICT to,
                          int64_t padded_rows, int64_t padded_columns) {
  const hn::ScalableTag<float> f32;
  const int64_t lanes = hn::Lanes(f32);
  for (int64_t i = 0; i < rows; ++i, from += stride, to += padded_columns) {
    int64_t j = 0;
    for (; j + lanes <= columns; j += lanes) hn::StoreU(load_f32(f32, from + j), f32, to + j);
    for (; j < columns; ++j) to[j] = static_cast<float>(from[j]);
    for (; j < padded_columns; ++j) to[j] = 0.0f;
  }
  if (rows < padded_rows) std::memset(to, 0, sizeof(float) * (padded_rows - rows) * padded_columns);
}

/// The other way: only the real rows and columns are written.
template <typename T>
HWY_INLINE void store_rows(const float* HWY_RESTRICT from, int64_t padded_columns, int64_t rows, int64_t columns, T* to,
                           int64_t stride) {
  const hn::ScalableTag<float> f32;
  const int64_t lanes = hn::Lanes(f32);
  for (int64_t i = 0; i < rows; ++i, from += padded_columns, to += stride) {
    int64_t j = 0;
    for (; j + lanes <= columns; j += lanes) store_f32(f32, hn::LoadU(f32, from + j), to + j);
    for (; j < columns; ++j) to[j] = static_cast<T>(from[j]);
  }
}

/// store_rows for what is not read again soon: past the caches where alignment allows it. hwy::FlushStream() makes it
/// visible to other threads.
HWY_INLINE void stream_rows(const float* from, int64_t padded_columns, int64_t rows, int64_t columns, float* to,
                            int64_t stride) {
  const hn::ScalableTag<float> f32;
  const int64_t lanes = hn::Lanes(f32);
  const bool aligned = reinterpret_cast<uintptr_t>(to) % (sizeof(float) * lanes) == 0;
  if (!aligned || columns % lanes != 0 || stride % lanes != 0) {
    store_rows(from, padded_columns, rows, columns, to, stride);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; j += lanes) {
      hn::Stream(hn::LoadU(f32, from + i * padded_columns + j), f32, to + i * stride + j);
    }
  }
}

}  // namespace furlong::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FURLONG_OPS_COMMON_ROWS_INL_H_
