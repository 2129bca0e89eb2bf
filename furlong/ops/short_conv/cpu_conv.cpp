// The convolution on the CPU, vectors of channels along a sequence.
//
//   u[t] = sum_j w_j x[t - T + j]      y = u sigmoid(u)
//   du   = dy sigmoid(u) (1 + u (1 - sigmoid(u)))
//   dx[t] = sum_j w_j du[t + T - j]    dw_j = sum_t du[t] x[t - T + j]

#include "furlong/ops/short_conv/cpu_conv.h"

#include <algorithm>

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/short_conv/cpu_conv.cpp"
#include "hwy/foreach_target.h"
// clang-format: the line above must come first.
#include "furlong/ops/common/rows-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace furlong::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Rows whose weight gradients are summed before they join the total: keeps the error of long sequences small.
constexpr int64_t kSumRows = 64;

template <class D>
HWY_INLINE hn::Vec<D> conv_sigmoid(D f32, hn::Vec<D> x) {
  const auto one = hn::Set(f32, 1.0f);
  // exp's argument stays below 88, where fp32 still has room.
  return hn::Div(one, hn::Add(one, hn::Exp(f32, hn::Min(hn::Neg(x), hn::Set(f32, 88.0f)))));
}

/// Calls body(tag, p) for the channels of a block, the last ones one by one.
template <typename Body>
HWY_INLINE void for_channels(int64_t begin, int64_t end, const Body& body) {
  const hn::ScalableTag<float> f32;
  const hn::CappedTag<float, 1> one;
  int64_t p = begin;
  for (; p + static_cast<int64_t>(hn::Lanes(f32)) <= end; p += hn::Lanes(f32)) body(f32, p);
  for (; p < end; ++p) body(one, p);
}

template <typename T>
HWY_INLINE void forward_rows(const short_conv_detail::ConvForward<T>& in) {
  for (int64_t i = 0; i < in.count; ++i) {
    for_channels(in.begin, in.end, [&](auto f32, int64_t p) HWY_ATTR {
      auto u = hn::Zero(f32);
      for (int64_t j = 0; j < in.width; ++j) {
        u = hn::MulAdd(hn::LoadU(f32, in.weight_WP + j * in.channels + p), load_f32(f32, in.rows[i + j] + p), u);
      }
      store_f32(f32, hn::Mul(u, conv_sigmoid(f32, u)), in.out + i * in.out_stride + p);
    });
  }
}

/// Row t of the walk: d_u of token t into the ring of the last W ones, its part of d_weight, and the gradient of row t
/// of `rows`, to which tokens t - T ... t contribute.
template <typename T>
HWY_INLINE void backward_row(const short_conv_detail::ConvBackward<T>& in, int64_t t, float* ring, float* sums) {
  const int64_t width = in.width;
  for_channels(in.begin, in.end, [&](auto f32, int64_t p) HWY_ATTR {
    const int64_t c = p - in.begin;
    auto d_u = hn::Zero(f32);
    if (t < in.count) {
      auto u = hn::Zero(f32);
      for (int64_t j = 0; j < width; ++j) {
        u = hn::MulAdd(hn::LoadU(f32, in.weight_WP + j * in.channels + p), load_f32(f32, in.rows[t + j] + p), u);
      }
      const auto s = conv_sigmoid(f32, u), one = hn::Set(f32, 1.0f);
      const auto slope = hn::Mul(s, hn::MulAdd(u, hn::Sub(one, s), one));
      d_u = hn::Mul(load_f32(f32, in.d_out[t] + p), slope);
      for (int64_t j = 0; j < width; ++j) {
        float* sum = sums + j * short_conv_detail::kChannelBlock + c;
        hn::StoreU(hn::MulAdd(d_u, load_f32(f32, in.rows[t + j] + p), hn::LoadU(f32, sum)), f32, sum);
      }
    }
    hn::StoreU(d_u, f32, ring + t % width * short_conv_detail::kChannelBlock + c);
    if (in.d_rows[t] == nullptr) return;
    auto d_x = in.d_tail[t] == nullptr ? hn::Zero(f32) : load_f32(f32, in.d_tail[t] + p);
    for (int64_t j = 0; j < std::min(width, t + 1); ++j) {
      const auto later = hn::LoadU(f32, ring + (t - j) % width * short_conv_detail::kChannelBlock + c);
      d_x = hn::MulAdd(hn::LoadU(f32, in.weight_WP + j * in.channels + p), later, d_x);
    }
    store_f32(f32, d_x, in.d_rows[t] + p);
  });
}

template <typename T>
HWY_INLINE void backward_sequence(const short_conv_detail::ConvBackward<T>& in) {
  const int64_t cells = in.width * short_conv_detail::kChannelBlock;
  float* ring = in.scratch;
  float* sums = in.scratch + cells;
  std::fill(in.scratch, in.scratch + 2 * cells, 0.0f);
  const int64_t rows = in.count + in.width - 1;
  for (int64_t t = 0; t < rows; ++t) {
    backward_row(in, t, ring, sums);
    if ((t + 1) % kSumRows != 0 && t + 1 < rows) continue;
    for (int64_t j = 0; j < in.width; ++j) {
      for (int64_t p = in.begin; p < in.end; ++p) {
        float& sum = sums[j * short_conv_detail::kChannelBlock + p - in.begin];
        in.d_weight_WP[j * in.channels + p] += sum;
        sum = 0.0f;
      }
    }
  }
}

void conv_forward_f32(const short_conv_detail::ConvForward<float>& in) {
  forward_rows(in);
}
void conv_forward_bf16(const short_conv_detail::ConvForward<c10::BFloat16>& in) {
  forward_rows(in);
}
void conv_backward_f32(const short_conv_detail::ConvBackward<float>& in) {
  backward_sequence(in);
}
void conv_backward_bf16(const short_conv_detail::ConvBackward<c10::BFloat16>& in) {
  backward_sequence(in);
}

}  // namespace furlong::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace furlong {

HWY_EXPORT(conv_forward_f32);
HWY_EXPORT(conv_forward_bf16);
HWY_EXPORT(conv_backward_f32);
HWY_EXPORT(conv_backward_bf16);

namespace short_conv_detail {

void conv_forward(const ConvForward<float>& in) {
  HWY_DYNAMIC_DISPATCH(conv_forward_f32)(in);
}
void conv_forward(const ConvForward<c10::BFloat16>& in) {
  HWY_DYNAMIC_DISPATCH(conv_forward_bf16)(in);
}
void conv_backward(const ConvBackward<float>& in) {
  HWY_DYNAMIC_DISPATCH(conv_backward_f32)(in);
}
void conv_backward(const ConvBackward<c10::BFloat16>& in) {
  HWY_DYNAMIC_DISPATCH(conv_backward_bf16)(in);
}

}  // namespace short_conv_detail
}  // namespace furlong

#endif  // HWY_ONCE
