// Products of small row-major fp32 matrices that sit in cache, for kernels built from 16-row blocks. Included once for
// each SIMD target by a source file that uses Highway's foreach_target.
//
// Every element is summed over the inner index in ascending order by one chain of fused multiply-adds, so its bits do
// not depend on the other rows and columns of the call.

#if defined(FURLONG_OPS_COMMON_SMALL_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURLONG_OPS_COMMON_SMALL_GEMM_INL_H_
#undef FURLONG_OPS_COMMON_SMALL_GEMM_INL_H_
#else
#define FURLONG_OPS_COMMON_SMALL_GEMM_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace furlong::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// A matrix read element by element: at(i, j) = data[i * row + j * column]. A transposed operand swaps the strides.
struct Operand {
  const float* data;
  int64_t row;
  int64_t column;
};

inline Operand rows_of(const float* data, int64_t stride) {
  return {data, stride, 1};
}
inline Operand transposed(const float* data, int64_t stride) {
  return {data, 1, stride};
}

// 8 x 2 vectors keep 16 sums in flight: two FMA pipes of latency 4 need 8. With 16 registers (AVX2) 4 x 2 is the
// widest tile that leaves room for the operands.
#if HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif

/// What a product adds to.
enum class Onto { kNothing, kMatrix, kScaledRows };
struct Base {
  const float* data = nullptr;
  int64_t row = 0;
  const float* row_scale = nullptr;  // of kScaledRows
};

template <int kVectors, Onto kOnto>
HWY_INLINE void gemm_tile(int64_t inner, Operand a, const float* HWY_RESTRICT b, int64_t b_row, Base base, float* d,
                          int64_t d_row) {
  const hn::ScalableTag<float> f32;
  using Vec = hn::Vec<decltype(f32)>;
  const int64_t lanes = hn::Lanes(f32);
  Vec sum[kTileRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = kOnto == Onto::kNothing ? hn::Zero(f32) : hn::LoadU(f32, base.data + i * base.row + j * lanes);
      if constexpr (kOnto == Onto::kScaledRows) sum[i][j] = hn::Mul(hn::Set(f32, base.row_scale[i]), sum[i][j]);
    }
  }
  for (int64_t k = 0; k < inner; ++k) {
    Vec right[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) right[j] = hn::LoadU(f32, b + k * b_row + j * lanes);
#pragma GCC unroll 8
    for (int i = 0; i < kTileRows; ++i) {
      const Vec left = hn::Set(f32, a.data[i * a.row + k * a.column]);
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(left, right[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) hn::StoreU(sum[i][j], f32, d + i * d_row + j * lanes);
  }
}

struct NothingBetween {
  void operator()() const {}
};

/// d [m, n] = base + a [m, inner] b [inner, n]. m is a multiple of 8, n of 16 columns; base may be d itself. `between`
/// runs before every tile: time to ask for data of later work.
template <Onto kOnto, typename Between>
HWY_INLINE void gemm_onto(int64_t m, int64_t n, int64_t inner, Operand a, const float* b, int64_t b_row, Base base,
                          float* d, int64_t d_row, const Between& between) {
  const int64_t lanes = hn::Lanes(hn::ScalableTag<float>());
  const auto tile_base = [&](int64_t i, int64_t column) {
    if (kOnto == Onto::kNothing) return Base{};
    return Base{base.data + i * base.row + column, base.row, kOnto == Onto::kScaledRows ? base.row_scale + i : nullptr};
  };
  int64_t column = 0;
  for (; column + 2 * lanes <= n; column += 2 * lanes) {
    for (int64_t i = 0; i < m; i += kTileRows) {
      between();
      gemm_tile<2, kOnto>(inner, {a.data + i * a.row, a.row, a.column}, b + column, b_row, tile_base(i, column),
                          d + i * d_row + column, d_row);
    }
  }
  for (; column < n; column += lanes) {
    for (int64_t i = 0; i < m; i += kTileRows) {
      gemm_tile<1, kOnto>(inner, {a.data + i * a.row, a.row, a.column}, b + column, b_row, tile_base(i, column),
                          d + i * d_row + column, d_row);
    }
  }
}

/// d (+)= a b.
template <bool kAdd, typename Between = NothingBetween>
HWY_INLINE void gemm(int64_t m, int64_t n, int64_t inner, Operand a, const float* b, int64_t b_row, float* d,
                     int64_t d_row, const Between& between = {}) {
  gemm_onto<kAdd ? Onto::kMatrix : Onto::kNothing>(m, n, inner, a, b, b_row, Base{d, d_row}, d, d_row, between);
}

/// d [n, m] = a [m, n]^T; m and n are multiples of 4.
HWY_INLINE void transpose(int64_t m, int64_t n, const float* HWY_RESTRICT a, int64_t a_row, float* HWY_RESTRICT d,
                          int64_t d_row) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) d[j * d_row + i] = a[i * a_row + j];
  }
#else
  const hn::FixedTag<float, 4> f32;
  constexpr int64_t kLine = 16;  // rows of d at a time: more rows of a power of two length would fall into few L1 sets
  for (int64_t first = 0; first < n; first += kLine) {
    for (int64_t i = 0; i < m; i += 4) {
      for (int64_t j = first; j < std::min(n, first + kLine); j += 4) {
        const float* from = a + i * a_row + j;
        const auto r0 = hn::LoadU(f32, from), r1 = hn::LoadU(f32, from + a_row);
        const auto r2 = hn::LoadU(f32, from + 2 * a_row), r3 = hn::LoadU(f32, from + 3 * a_row);
        const auto low01 = hn::InterleaveLower(f32, r0, r1), high01 = hn::InterleaveUpper(f32, r0, r1);
        const auto low23 = hn::InterleaveLower(f32, r2, r3), high23 = hn::InterleaveUpper(f32, r2, r3);
        float* to = d + j * d_row + i;
        hn::StoreU(hn::ConcatLowerLower(f32, low23, low01), f32, to);
        hn::StoreU(hn::ConcatUpperUpper(f32, low23, low01), f32, to + d_row);
        hn::StoreU(hn::ConcatLowerLower(f32, high23, high01), f32, to + 2 * d_row);
        hn::StoreU(hn::ConcatUpperUpper(f32, high23, high01), f32, to + 3 * d_row);
      }
    }
  }
#endif
}

}  // namespace furlong::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FURLONG_OPS_COMMON_SMALL_GEMM_INL_H_
