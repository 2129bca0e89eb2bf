// Products of bf16 activations straight from packed rows by AVX512-BF16 dot products (Highway 1.0.3 has no target with
// them). The scheme is that of product.cpp with 16-bit lanes of 4 codes: one permutation gives 32 weights in bf16, in
// which they are exact, and one dot product takes two of them a 32-bit lane. Products are exact, sums fp32; what falls
// below the normal range counts as zero.

#include "furlong/ops/mxfp4/product.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <c10/util/BFloat16.h>
#include <hwy/highway.h>
#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "furlong/ops/mxfp4/mxfp4.h"

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,avx2");
namespace furlong {
namespace {

constexpr int64_t kChunk = 128;  // inputs of a vector of codes
constexpr int64_t kChunkBytes = kChunk / 2;
constexpr int64_t kChunkScales = kChunk / kMxBlock;
constexpr int64_t kSteps = 4;   // codes of a lane
constexpr int64_t kLanes = 32;  // of 16 bits

int64_t chunks(int64_t inputs) {
  return (inputs + kChunk - 1) / kChunk;
}

int64_t arranged_bytes(int64_t inputs) {
  return chunks(inputs) * kChunk * static_cast<int64_t>(sizeof(uint16_t));
}

/// Chunk by chunk: [step, lane], lane l of step t holding input 4 l + t.
void arrange(const void* x, int64_t inputs, void* arranged) {
  const uint16_t* from = static_cast<const uint16_t*>(x);
  uint16_t* to = static_cast<uint16_t*>(arranged);
  for (int64_t start = 0; start < inputs; start += kChunk) {
    for (int64_t step = 0; step < kSteps; ++step, to += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t input = start + lane * kSteps + step;
        to[lane] = input < inputs ? from[input] : 0;
      }
    }
  }
}

/// The same bits; std::bit_cast would be a function without these instructions.
HWY_INLINE __m512bh as_bf16(__m512i bits) {
  return (__m512bh)bits;
}

/// What the loops keep in registers.
struct Constants {
  __m512i values;  // bf16 of the 16 codes, twice: the permutation reads 5 bits
  __m512i to_top;  // moves the scale byte of a lane's block to the top of the lane
  __m512i least = _mm512_set1_epi32(1 << 22);

  Constants() {
    alignas(64) uint16_t bf16[kLanes];
    alignas(64) uint32_t lookup[16];
    const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (uint32_t i = 0; i < kLanes; ++i) {
      bf16[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(magnitudes[i & 7]) >> 16 | (i & 8) << 12);
    }
    for (uint32_t lane = 0; lane < 16; ++lane) lookup[lane] = (lane / 4) << 24 | 0x808080;
    values = _mm512_load_si512(bf16);
    to_top = _mm512_load_si512(lookup);
  }

  /// Scales of the lanes of a chunk; 255 becomes infinity.
  HWY_INLINE __m512 scales(const uint8_t* bytes) const {
    int32_t four;
    std::memcpy(&four, bytes, sizeof(four));
    const __m512i field = _mm512_srli_epi32(_mm512_shuffle_epi8(_mm512_set1_epi32(four), to_top), 1);
    return _mm512_castsi512_ps(_mm512_max_epu32(field, least));
  }
};

template <int kOutputs>
struct Rows {
  const uint8_t* packed[kOutputs];
  const uint8_t* scale[kOutputs];
};

template <int kOutputs, int kRows>
HWY_INLINE void add_chunk(const Constants& constants, const Rows<kOutputs>& rows, int64_t index, const uint8_t* ahead,
                          const char* x, int64_t x_stride, __m512 (&sums)[kOutputs][kRows]) {
  __m512i codes[kOutputs];
  __m512 part[kOutputs][kRows];
#pragma GCC unroll 4
  for (int o = 0; o < kOutputs; ++o) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead) + o * kChunkBytes, _MM_HINT_T0);
    codes[o] = _mm512_loadu_si512(rows.packed[o] + index * kChunkBytes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) part[o][r] = _mm512_setzero_ps();
  }
#pragma GCC unroll 4
  for (int t = 0; t < kSteps; ++t) {
#pragma GCC unroll 4
    for (int o = 0; o < kOutputs; ++o) {
      const auto weight = as_bf16(_mm512_permutexvar_epi16(codes[o], constants.values));
      codes[o] = _mm512_srli_epi16(codes[o], 4);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m512i from = _mm512_loadu_si512(x + r * x_stride + t * kLanes * sizeof(uint16_t));
        part[o][r] = _mm512_dpbf16_ps(part[o][r], weight, as_bf16(from));
      }
    }
  }
#pragma GCC unroll 4
  for (int o = 0; o < kOutputs; ++o) {
    const __m512 factor = constants.scales(rows.scale[o] + index * kChunkScales);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[o][r] = _mm512_fmadd_ps(factor, part[o][r], sums[o][r]);
  }
}

struct Output {
  c10::BFloat16* y;
  int64_t stride;
  bool finite = true;

  HWY_INLINE void put(int64_t row, int64_t output, float value) {
    finite = finite && std::isfinite(value);
    y[row * stride + output] = static_cast<c10::BFloat16>(value);
  }
};

/// kOutputs outputs from `first` on, kRows rows from `row` on.
template <int kOutputs, int kRows>
HWY_INLINE void tile(const Constants& constants, const Mxfp4Matrix& matrix, int64_t first, const char* x, int64_t row,
                     Output* output) {
  __m512 sums[kOutputs][kRows];
  Rows<kOutputs> rows;
#pragma GCC unroll 4
  for (int o = 0; o < kOutputs; ++o) {
    rows.packed[o] = matrix.packed + (first + o) * matrix.packed_stride;
    rows.scale[o] = matrix.scale + (first + o) * matrix.scale_stride;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[o][r] = _mm512_setzero_ps();
  }
  const int64_t stride = arranged_bytes(matrix.inputs), x_chunk = arranged_bytes(kChunk);
  const uint8_t* ahead = rows.packed[0] + kOutputs * matrix.packed_stride;
  const int64_t whole = matrix.inputs / kChunk, left = matrix.inputs % kChunk;
  x += row * stride;
  for (int64_t i = 0; i < whole; ++i) {
    add_chunk(constants, rows, i, ahead + i * kOutputs * kChunkBytes, x + i * x_chunk, stride, sums);
  }
  if (left > 0) {
    uint8_t packed[kOutputs][kChunkBytes] = {}, scale[kOutputs][kChunkScales] = {};
    Rows<kOutputs> rest;
    for (int o = 0; o < kOutputs; ++o) {
      std::memcpy(packed[o], rows.packed[o] + whole * kChunkBytes, left / 2);
      std::memcpy(scale[o], rows.scale[o] + whole * kChunkScales, left / kMxBlock);
      rest.packed[o] = packed[o];
      rest.scale[o] = scale[o];
    }
    add_chunk(constants, rest, 0, ahead, x + whole * x_chunk, stride, sums);
  }
  for (int o = 0; o < kOutputs; ++o) {
    for (int r = 0; r < kRows; ++r) output->put(row + r, first + o, _mm512_reduce_add_ps(sums[o][r]));
  }
}

template <int kRows>
HWY_INLINE void product_of_rows(const Constants& constants, const Mxfp4Matrix& matrix, int64_t first, int64_t last,
                                const char* x, int64_t row, Output* output) {
  int64_t o = first;
  for (; o + 4 <= last; o += 4) tile<4, kRows>(constants, matrix, o, x, row, output);
  for (; o < last; ++o) tile<1, kRows>(constants, matrix, o, x, row, output);
}

bool product(const Mxfp4Matrix& matrix, int64_t first, int64_t last, const void* x_rows, int64_t rows, void* y,
             int64_t y_stride) {
  const Constants constants;
  const char* x = static_cast<const char*>(x_rows);
  Output output{static_cast<c10::BFloat16*>(y), y_stride};
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) product_of_rows<4>(constants, matrix, first, last, x, row, &output);
  for (; row + 2 <= rows; row += 2) product_of_rows<2>(constants, matrix, first, last, x, row, &output);
  if (row < rows) product_of_rows<1>(constants, matrix, first, last, x, row, &output);
  return output.finite;
}

}  // namespace
}  // namespace furlong
HWY_POP_ATTRIBUTES

namespace furlong {

std::optional<Mxfp4ProductKernels> mxfp4_dot_product_kernels() {
  static const bool supported = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!supported) return std::nullopt;
  return Mxfp4ProductKernels{arranged_bytes, arrange, product};
}

}  // namespace furlong

#else

namespace furlong {

std::optional<Mxfp4ProductKernels> mxfp4_dot_product_kernels() {
  return std::nullopt;
}

}  // namespace furlong

#endif
