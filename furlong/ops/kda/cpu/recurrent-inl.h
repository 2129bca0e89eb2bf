// The few rows of a short last chunk, token by token: cheaper than a padded block. Included once for each SIMD target.
// As in cpu/step.cpp: with S' = diag(decay) S and written = beta (v - S'^T k),
//
//   out = S'^T (scale q) + (scale q . k) written        S = S' + k written^T

#if defined(FURLONG_OPS_KDA_CPU_RECURRENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FURLONG_OPS_KDA_CPU_RECURRENT_INL_H_
#undef FURLONG_OPS_KDA_CPU_RECURRENT_INL_H_
#else
#define FURLONG_OPS_KDA_CPU_RECURRENT_INL_H_
#endif

#include "furlong/ops/kda/cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furlong::HWY_NAMESPACE {

// A chunk with so few rows is walked token by token.
constexpr int64_t kRecurrentRows = 8;

/// kVectors of value columns through all rows: their part of the state stays in L1.
template <int kVectors>
HWY_INLINE void recur_columns(const ChunkScratch& s, int64_t rows, int64_t column) {
  const hn::ScalableTag<float> f32;
  using Vec = hn::Vec<decltype(f32)>;
  const int64_t lanes = hn::Lanes(f32), K = s.K, V = s.V;
  float* HWY_RESTRICT state = s.state + column;
  for (int64_t t = 0; t < rows; ++t) {
    const float* decay = s.row + t * K;
    const float* k = s.k + t * K;
    const float* decayed_q = s.from_start + t * K;
    const float* decayed_k = s.from_start + (rows + t) * K;
    Vec recalled[kVectors], read[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) recalled[j] = read[j] = hn::Zero(f32);
    for (int64_t d = 0; d < K; ++d) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        const Vec x = hn::LoadU(f32, state + d * V + j * lanes);
        recalled[j] = hn::MulAdd(hn::Set(f32, decayed_k[d]), x, recalled[j]);
        read[j] = hn::MulAdd(hn::Set(f32, decayed_q[d]), x, read[j]);
      }
    }
    Vec written[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      const int64_t n = t * V + column + j * lanes;
      const Vec correction = hn::Sub(hn::LoadU(f32, s.v + n), recalled[j]);
      written[j] = hn::Mul(hn::Set(f32, s.beta[t]), correction);
      hn::StoreU(correction, f32, s.correction + n);
      hn::StoreU(hn::MulAdd(hn::Set(f32, s.pair_sum[t]), written[j], read[j]), f32, s.product + n);
    }
    for (int64_t d = 0; d < K; ++d) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        float* x = state + d * V + j * lanes;
        const Vec kept = hn::Mul(hn::Set(f32, decay[d]), hn::LoadU(f32, x));
        hn::StoreU(hn::MulAdd(hn::Set(f32, k[d]), written[j], kept), f32, x);
      }
    }
  }
}

/// out in s.product, corrections, and the state moved past `rows` <= kRecurrentRows rows. s.v is loaded.
template <typename T>
HWY_INLINE void recur(const kda::ChunkInputs<T>& in, int64_t h, int64_t first, int64_t rows, const ChunkScratch& s) {
  const hn::ScalableTag<float> f32;
  const int64_t lanes = hn::Lanes(f32), K = s.K;
  load_rows(in.q.at(first, h), in.q.token_stride, rows, in.size.key_size, s.q, rows, K);
  load_rows(in.k.at(first, h), in.k.token_stride, rows, in.size.key_size, s.k, rows, K);
  load_rows(in.decay_log.at(first, h), in.decay_log.token_stride, rows, in.size.key_size, s.g, rows, K);
  for (int64_t t = 0; t < rows; ++t) {
    s.beta[t] = *in.beta.at(first + t, h);
    auto q_dot_k = hn::Zero(f32);
    for (int64_t n = t * K; n < (t + 1) * K; n += lanes) {
      const auto decay = hn::Exp(f32, hn::LoadU(f32, s.g + n));
      const auto q = hn::Mul(hn::Set(f32, static_cast<float>(in.size.scale)), hn::LoadU(f32, s.q + n));
      const auto k = hn::LoadU(f32, s.k + n);
      q_dot_k = hn::MulAdd(q, k, q_dot_k);
      hn::StoreU(decay, f32, s.row + n);
      hn::StoreU(hn::Mul(decay, q), f32, s.from_start + n);
      hn::StoreU(hn::Mul(decay, k), f32, s.from_start + rows * K + n);
    }
    s.pair_sum[t] = hn::GetLane(hn::SumOfLanes(f32, q_dot_k));
  }
  int64_t column = 0;
  for (; column + 2 * lanes <= s.V; column += 2 * lanes) recur_columns<2>(s, rows, column);
  for (; column < s.V; column += lanes) recur_columns<1>(s, rows, column);
}

}  // namespace furlong::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FURLONG_OPS_KDA_CPU_RECURRENT_INL_H_
