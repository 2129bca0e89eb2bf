// Products straight from packed rows. A lane holds 4 bytes of a row, 8 codes; shifting it right by 4 brings the next
// one to where CodeTable reads it. L lanes thus cover a chunk of 8 L inputs in 8 steps, step t meeting inputs 8 j + t
// in lane j, and the activations are laid out once in that order: nothing is shuffled per weight. A block is 4 lanes;
// the sums of a chunk are scaled lane by lane and added up.

#include "furlong/ops/mxfp4/product.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/mxfp4/product.cpp"
#include <hwy/foreach_target.h>

#include <hwy/cache_control.h>

#include "furlong/ops/mxfp4/codes-inl.h"
#include "furlong/ops/mxfp4/mxfp4.h"

HWY_BEFORE_NAMESPACE();
namespace furlong {
namespace HWY_NAMESPACE {
namespace {

constexpr int64_t kSteps = 8;         // codes of a lane
constexpr int64_t kLanesOfBlock = 4;  // 32 codes
constexpr int64_t kBytesOfBlock = 16;

HWY_INLINE int64_t lanes() {
  return static_cast<int64_t>(hn::Lanes(DF()));
}

/// fp32 elements of an arranged row.
int64_t arranged_size(int64_t inputs) {
  const int64_t chunk = kSteps * lanes();
  return (inputs + chunk - 1) / chunk * chunk;
}

int64_t arranged_bytes(int64_t inputs) {
  return arranged_size(inputs) * static_cast<int64_t>(sizeof(float));
}

template <typename T>
void arrange(const void* x, int64_t inputs, void* arranged) {
  const T* from = static_cast<const T*>(x);
  float* to = static_cast<float*>(arranged);
  const int64_t chunk = kSteps * lanes();
  for (int64_t start = 0; start < inputs; start += chunk, to += chunk) {
    const int64_t real = std::min(chunk, inputs - start) / kSteps;  // lanes with inputs
    for (int64_t t = 0; t < kSteps; ++t) {
      for (int64_t lane = 0; lane < real; ++lane) {
        to[t * lanes() + lane] = static_cast<float>(from[start + lane * kSteps + t]);
      }
      for (int64_t lane = real; lane < lanes(); ++lane) to[t * lanes() + lane] = 0.0f;
    }
  }
}

HWY_INLINE VU load_codes(const uint8_t* from) {
#if HWY_TARGET == HWY_SCALAR
  uint32_t codes;
  std::memcpy(&codes, from, sizeof(codes));
  return hn::Set(DU(), codes);
#else
  return hn::BitCast(DU(), hn::LoadU(hn::Repartition<uint8_t, DF>(), from));
#endif
}

/// The scale of each lane of a chunk. A byte 255 becomes infinity, so that no sum it touches stays finite.
class LaneScales {
#if HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_AVX2
  using Bytes = std::conditional_t<HWY_TARGET <= HWY_AVX3, uint32_t, uint16_t>;  // one of each block
  using D8 = hn::Repartition<uint8_t, DF>;
  hn::Vec<D8> to_top_;  // each lane takes its block's byte to its top, one bit above the exponent field

 public:
  LaneScales() {
    HWY_ALIGN uint32_t lookup[HWY_MAX_BYTES / sizeof(uint32_t)];
    for (int64_t lane = 0; lane < lanes(); ++lane) {
      lookup[lane] = static_cast<uint32_t>(lane / kLanesOfBlock) << 24 | 0x808080;
    }
    to_top_ = hn::BitCast(D8(), hn::Load(DU(), lookup));
  }

  HWY_INLINE VF operator()(const uint8_t* scale) const {
    const DU du;
    Bytes bytes;
    std::memcpy(&bytes, scale, sizeof(bytes));
    const auto all = hn::BitCast(D8(), hn::Set(du, uint32_t{bytes}));
    const auto field = hn::ShiftRight<1>(hn::BitCast(du, hn::TableLookupBytesOr0(all, to_top_)));
    return hn::BitCast(DF(), hn::Max(field, hn::Set(du, 1u << 22)));  // byte 0: 2^-127
  }
#else
 public:
  HWY_INLINE VF operator()(const uint8_t* scale) const { return hn::Set(DF(), mx_scale(*scale)); }
#endif
};

/// Sums of kOutputs rows of the matrix with kRows rows of activations.
template <int kOutputs, int kRows>
struct Sums {
  VF of[kOutputs][kRows];
};

/// Packed rows and their scales.
template <int kOutputs>
struct Chunk {
  const uint8_t* packed[kOutputs];
  const uint8_t* scale[kOutputs];

  /// Those of chunk `index`, counted from here.
  HWY_INLINE Chunk at(int64_t index) const {
    Chunk there;
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      there.packed[o] = packed[o] + index * kLanesOfBlock * lanes();
      there.scale[o] = scale[o] + index * lanes() / kLanesOfBlock;
    }
    return there;
  }
};

/// The last blocks of rows, which do not fill a chunk: copies with zeros behind them.
template <int kOutputs>
struct RestOfRows {
  uint8_t packed[kOutputs][HWY_MAX_BYTES] = {};
  uint8_t scale[kOutputs][HWY_MAX_BYTES / kBytesOfBlock + 1] = {};

  Chunk<kOutputs> copy(const Chunk<kOutputs>& from, int64_t inputs) {
    Chunk<kOutputs> chunk;
    for (int o = 0; o < kOutputs; ++o) {
      std::memcpy(packed[o], from.packed[o], inputs / 2);
      std::memcpy(scale[o], from.scale[o], inputs / kMxBlock);
      chunk.packed[o] = packed[o];
      chunk.scale[o] = scale[o];
    }
    return chunk;
  }
};

template <int kOutputs, int kRows>
HWY_INLINE void add_chunk(const CodeTable& values, const LaneScales& scales, const Chunk<kOutputs>& chunk,
                          const uint8_t* ahead, const float* x, int64_t x_stride, Sums<kOutputs, kRows>& sums) {
  VU codes[kOutputs];
  VF part[kOutputs][kRows];
#pragma GCC unroll 8
  for (int o = 0; o < kOutputs; ++o) {
    hwy::Prefetch(ahead + o * kLanesOfBlock * lanes());
    codes[o] = load_codes(chunk.packed[o]);
  }
#pragma GCC unroll 8
  for (int t = 0; t < kSteps; ++t) {
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      const VF weight = values(codes[o]);
      codes[o] = hn::ShiftRight<4>(codes[o]);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const VF from = hn::LoadU(DF(), x + r * x_stride + t * lanes());
        part[o][r] = t == 0 ? hn::Mul(weight, from) : hn::MulAdd(weight, from, part[o][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int o = 0; o < kOutputs; ++o) {
    const VF factor = scales(chunk.scale[o]);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums.of[o][r] = hn::MulAdd(factor, part[o][r], sums.of[o][r]);
  }
}

/// The outputs from `first` on.
template <int kOutputs, int kRows>
HWY_INLINE Sums<kOutputs, kRows> tile(const Mxfp4Matrix& matrix, int64_t first, const float* x, int64_t x_stride) {
  const CodeTable values;
  const LaneScales scales;
  Sums<kOutputs, kRows> sums;
  Chunk<kOutputs> chunk;
#pragma GCC unroll 8
  for (int o = 0; o < kOutputs; ++o) {
    chunk.packed[o] = matrix.packed + (first + o) * matrix.packed_stride;
    chunk.scale[o] = matrix.scale + (first + o) * matrix.scale_stride;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums.of[o][r] = hn::Zero(DF());
  }
  const int64_t size = kSteps * lanes();
  // The rows of the tile below are asked for in the order of memory, not of use: one stream, far enough ahead.
  const uint8_t* ahead = chunk.packed[0] + kOutputs * matrix.packed_stride;
  const int64_t step = kOutputs * kLanesOfBlock * lanes();
  const int64_t whole = matrix.inputs / size;
  for (int64_t i = 0; i < whole; ++i)
    add_chunk(values, scales, chunk.at(i), ahead + i * step, x + i * size, x_stride, sums);
  if (whole * size < matrix.inputs) {
    RestOfRows<kOutputs> rest;
    const Chunk<kOutputs> copied = rest.copy(chunk.at(whole), matrix.inputs - whole * size);
    add_chunk(values, scales, copied, ahead + whole * step, x + whole * size, x_stride, sums);
  }
  return sums;
}

template <typename T>
struct Output {
  T* y;
  int64_t stride;
  bool finite = true;

  HWY_INLINE void put(int64_t row, int64_t output, float value) {
    finite = finite && std::isfinite(value);
    y[row * stride + output] = static_cast<T>(value);
  }
};

/// The outputs [first, last) of kRows rows from `row` on.
template <int kOutputs, int kRows, typename T>
HWY_INLINE void product_of_rows(const Mxfp4Matrix& matrix, int64_t first, int64_t last, const float* x, int64_t row,
                                Output<T>* output) {
  const int64_t stride = arranged_size(matrix.inputs);
  x += row * stride;
  int64_t o = first;
  for (; o + kOutputs <= last; o += kOutputs) {
    const Sums<kOutputs, kRows> sums = tile<kOutputs, kRows>(matrix, o, x, stride);
    for (int i = 0; i < kOutputs; ++i) {
      for (int r = 0; r < kRows; ++r) output->put(row + r, o + i, sum_of_lanes(sums.of[i][r]));
    }
  }
  for (; o < last; ++o) {
    const Sums<1, kRows> sums = tile<1, kRows>(matrix, o, x, stride);
    for (int r = 0; r < kRows; ++r) output->put(row + r, o, sum_of_lanes(sums.of[0][r]));
  }
}

template <typename T>
bool product(const Mxfp4Matrix& matrix, int64_t first, int64_t last, const void* x_rows, int64_t rows, void* y,
             int64_t y_stride) {
  // A step keeps kOutputs kRows sums in registers, of which AVX-512 has 32, others 16. Rows of x come from the second
  // level cache when they are many; each is then used for kOutputs products.
  constexpr int kOutputs = HWY_TARGET <= HWY_AVX3 ? 4 : 2;
  const float* x = static_cast<const float*>(x_rows);
  Output<T> output{static_cast<T*>(y), y_stride};
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) product_of_rows<kOutputs, 4>(matrix, first, last, x, row, &output);
  for (; row + 2 <= rows; row += 2) product_of_rows<kOutputs, 2>(matrix, first, last, x, row, &output);
  if (row < rows) product_of_rows<4, 1>(matrix, first, last, x, row, &output);
  return output.finite;
}

template <typename T>
Mxfp4ProductKernels kernels_of() {
  return {arranged_bytes, arrange<T>, product<T>};
}

Mxfp4ProductKernels kernels_for(bool bf16) {
  return bf16 ? kernels_of<c10::BFloat16>() : kernels_of<float>();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace furlong
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furlong {

HWY_EXPORT(kernels_for);

Mxfp4ProductKernels mxfp4_simd_product_kernels(bool bf16) {
  return HWY_DYNAMIC_DISPATCH(kernels_for)(bf16);
}

Mxfp4ProductKernels mxfp4_product_kernels(bool bf16) {
  // Tests hide instruction sets from Highway; the dot products are hidden with AVX-512.
  const bool try_dot = bf16 && HWY_ARCH_X86 && (hwy::SupportedTargets() & HWY_AVX3) != 0;
  const std::optional<Mxfp4ProductKernels> dot = try_dot ? mxfp4_dot_product_kernels() : std::nullopt;
  return dot ? *dot : mxfp4_simd_product_kernels(bf16);
}

}  // namespace furlong
#endif  // HWY_ONCE
