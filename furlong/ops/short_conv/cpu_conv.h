#pragma once

// Plain arguments of the convolution kernels.
//   P channels   W kernel width   T = W - 1 tail columns

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace furlong::short_conv_detail {

// Channels that one task takes through a sequence: a few vectors wide, so that weights and partial sums stay in L1.
constexpr int64_t kChannelBlock = 64;

/// Outputs first ... first + count - 1 of a sequence, channels begin ... end - 1. rows[i + j] is the input row that
/// weight j meets in output i: tail rows, then the tokens.
template <typename T>
struct ConvForward {
  const T* const* rows;
  int64_t count;
  const float* weight_WP;
  int64_t width, channels, begin, end;
  T* out;  // of the first output
  int64_t out_stride;
};

/// A whole sequence of `count` tokens for channels begin ... end - 1. rows: T tail rows, then the tokens.
template <typename T>
struct ConvBackward {
  const T* const* rows;
  const T* const* d_out;   // [count]
  const T* const* d_tail;  // [count + T]: the final tail's gradient at each of `rows`, or null
  T* const* d_rows;        // [count + T], null where no gradient is wanted
  int64_t count;
  const float* weight_WP;
  int64_t width, channels, begin, end;
  float* d_weight_WP;  // added to
  float* scratch;      // 2 W kChannelBlock floats
};

void conv_forward(const ConvForward<float>& in);
void conv_forward(const ConvForward<c10::BFloat16>& in);
void conv_backward(const ConvBackward<float>& in);
void conv_backward(const ConvBackward<c10::BFloat16>& in);

}  // namespace furlong::short_conv_detail
