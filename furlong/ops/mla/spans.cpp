// Online softmax over a span: blocks of entries are widened to fp32 once and used by every row of the group.

#include "furlong/ops/mla/spans.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/mla/spans.cpp"
#include "hwy/foreach_target.h"  // before simd-inl.h
//
#include "furlong/ops/common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furlong {
namespace HWY_NAMESPACE {

using mla_detail::kGroupRows;
using mla_detail::Span;
using mla_detail::SpanResult;

/// Entries widened and scored together: 32 x 576 fp32 are 72 KB, which the second-level cache holds.
constexpr int64_t kEntryBlock = 32;
/// Rows that share each load of an entry.
constexpr int64_t kRowTile = 4;
static_assert(kGroupRows % kRowTile == 0);

/// scores[r][c] = <q_r, entry_c> for four rows.
HWY_INLINE void score_tile(const float* q, const float* entries, int64_t count, int64_t width, float* scores) {
  for (int64_t c = 0; c < count; ++c) {
    VF sum0 = hn::Zero(DF()), sum1 = sum0, sum2 = sum0, sum3 = sum0;
    for_each_vector(width, [&](int64_t i, auto part) HWY_ATTR {
      const VF e = load(entries + c * width + i, part);
      sum0 = hn::MulAdd(load(q + i, part), e, sum0);
      sum1 = hn::MulAdd(load(q + width + i, part), e, sum1);
      sum2 = hn::MulAdd(load(q + 2 * width + i, part), e, sum2);
      sum3 = hn::MulAdd(load(q + 3 * width + i, part), e, sum3);
    });
    scores[c] = sum_of_lanes(sum0);
    scores[kEntryBlock + c] = sum_of_lanes(sum1);
    scores[2 * kEntryBlock + c] = sum_of_lanes(sum2);
    scores[3 * kEntryBlock + c] = sum_of_lanes(sum3);
  }
}

/// numerator_r += sum_c p_rc latent_c for four rows.
HWY_INLINE void mix_tile(const float* p, const float* entries, int64_t count, int64_t width, int64_t latent,
                         float* numerator) {
  for_each_vector(latent, [&](int64_t i, auto part) HWY_ATTR {
    const DF d;
    VF sum0 = load(numerator + i, part), sum1 = load(numerator + latent + i, part);
    VF sum2 = load(numerator + 2 * latent + i, part), sum3 = load(numerator + 3 * latent + i, part);
    for (int64_t c = 0; c < count; ++c) {
      const VF e = load(entries + c * width + i, part);
      sum0 = hn::MulAdd(hn::Set(d, p[c]), e, sum0);
      sum1 = hn::MulAdd(hn::Set(d, p[kEntryBlock + c]), e, sum1);
      sum2 = hn::MulAdd(hn::Set(d, p[2 * kEntryBlock + c]), e, sum2);
      sum3 = hn::MulAdd(hn::Set(d, p[3 * kEntryBlock + c]), e, sum3);
    }
    store(sum0, numerator + i, part);
    store(sum1, numerator + latent + i, part);
    store(sum2, numerator + 2 * latent + i, part);
    store(sum3, numerator + 3 * latent + i, part);
  });
}

/// One row's online softmax: the first `visible` scores become e^(score - maximum), the rest 0. A greater maximum
/// rescales what the row has gathered.
HWY_INLINE void soften_row(float* scores, int64_t visible, int64_t latent, float* numerator, float& denominator,
                           float& maximum) {
  float block_maximum = maximum;
  for (int64_t c = 0; c < visible; ++c) block_maximum = std::max(block_maximum, scores[c]);
  if (block_maximum > maximum) {
    const VF factor = hn::Set(DF(), denominator > 0.0f ? std::exp(maximum - block_maximum) : 0.0f);
    denominator *= hn::GetLane(factor);
    for_each_vector(latent, [&](int64_t i, auto part)
                                HWY_ATTR { store(hn::Mul(load(numerator + i, part), factor), numerator + i, part); });
    maximum = block_maximum;
  }
  for_each_vector(visible, [&](int64_t i, auto part) HWY_ATTR {
    store(exp_of(hn::Sub(load(scores + i, part), hn::Set(DF(), maximum))), scores + i, part);
  });
  for (int64_t c = 0; c < visible; ++c) denominator += scores[c];
  for (int64_t c = visible; c < kEntryBlock; ++c) scores[c] = 0.0f;
}

const float* widen_entries(const float* entries, int64_t /*size*/, std::vector<float>& /*buffer*/) {
  return entries;
}

const float* widen_entries(const c10::BFloat16* entries, int64_t size, std::vector<float>& buffer) {
  buffer.resize(size);
  for_each_vector(size, [&](int64_t i, auto part) HWY_ATTR { store(load(entries + i, part), &buffer[i], part); });
  return buffer.data();
}

// Not named absorb_span: argument-dependent lookup would prefer the entry point in mla_detail.
template <typename T>
void soften_and_mix(const Span& span, const T* entries, const SpanResult& result) {
  const int64_t width = span.entry_size, latent = span.latent_size;
  std::fill_n(result.numerator, kGroupRows * latent, 0.0f);
  std::fill_n(result.denominator, kGroupRows, 0.0f);
  std::fill_n(result.maximum, kGroupRows, -INFINITY);
  std::vector<float> buffer;
  float scores[kRowTile * kEntryBlock];
  for (int64_t first = 0; first < span.count; first += kEntryBlock) {
    const int64_t count = std::min(kEntryBlock, span.count - first);
    const float* block = widen_entries(entries + first * width, count * width, buffer);
    for (int64_t row = 0; row < span.rows; row += kRowTile) {
      score_tile(span.q + row * width, block, count, width, scores);
      for (int64_t r = 0; r < kRowTile; ++r) {
        const int64_t visible =
            row + r < span.rows ? std::clamp<int64_t>(span.visible_end[row + r] - first, 0, count) : 0;
        soften_row(scores + r * kEntryBlock, visible, latent, result.numerator + (row + r) * latent,
                   result.denominator[row + r], result.maximum[row + r]);
      }
      mix_tile(scores, block, count, width, latent, result.numerator + row * latent);
    }
  }
}

void absorb_span_f32(const Span& span, const float* entries, const SpanResult& result) {
  soften_and_mix(span, entries, result);
}
void absorb_span_bf16(const Span& span, const c10::BFloat16* entries, const SpanResult& result) {
  soften_and_mix(span, entries, result);
}

}  // namespace HWY_NAMESPACE
}  // namespace furlong
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furlong {

HWY_EXPORT(absorb_span_f32);
HWY_EXPORT(absorb_span_bf16);

namespace mla_detail {

void absorb_span(const Span& span, const float* entries, const SpanResult& result) {
  HWY_DYNAMIC_DISPATCH(absorb_span_f32)(span, entries, result);
}
void absorb_span(const Span& span, const c10::BFloat16* entries, const SpanResult& result) {
  HWY_DYNAMIC_DISPATCH(absorb_span_bf16)(span, entries, result);
}

}  // namespace mla_detail
}  // namespace furlong
#endif  // HWY_ONCE
