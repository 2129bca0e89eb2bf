#pragma once

// The SIMD kernel of absorbed MLA over one span of a sequence's cache entries.
//   E = L + R entry width   L latent size

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace furlong::mla_detail {

/// Rows (one head of one query token each) that a task handles: their numerators, 16 x 512 fp32, stay close to the
/// core.
constexpr int64_t kGroupRows = 16;

/// Softmax of some rows over some entries: numerator [kGroupRows, L], relative to `maximum`.
struct SpanResult {
  float* numerator;
  float* denominator;
  float* maximum;
};

/// `q` [kGroupRows, E], scaled, rows past `rows` zero. Row r sees the entries below visible_end[r] of `entries`
/// [count, E]; entries at or past `count` are never read.
struct Span {
  const float* q;
  int64_t rows;
  const int64_t* visible_end;
  int64_t count;
  int64_t entry_size;
  int64_t latent_size;
};

void absorb_span(const Span& span, const float* entries, const SpanResult& result);
void absorb_span(const Span& span, const c10::BFloat16* entries, const SpanResult& result);

}  // namespace furlong::mla_detail
