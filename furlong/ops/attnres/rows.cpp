// Per-token kernels of the read. The S rows of a token fit L1 (10 sources x 256 x 4 bytes), so each source is read from
// memory once and a second time out of the cache.

#include "furlong/ops/attnres/rows.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/attnres/rows.cpp"
#include <hwy/foreach_target.h>

#include "furlong/ops/common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furlong {
namespace HWY_NAMESPACE {
namespace {  // other operators have functions of the same names

template <typename T>
HWY_INLINE const T* row_of(const void* data, int64_t token, int64_t size) {
  return static_cast<const T*>(data) + token * size;
}

template <typename T>
HWY_INLINE T* row_of(void* data, int64_t token, int64_t size) {
  return static_cast<T*>(data) + token * size;
}

/// In place: p = softmax(logit). Max and sum over S values, so that scalar code is as fast as any.
HWY_INLINE void softmax(float* p, int64_t count) {
  const float top = *std::max_element(p, p + count);
  float sum = 0.0f;
  for (int64_t s = 0; s < count; ++s) sum += p[s] = std::exp(p[s] - top);
  for (int64_t s = 0; s < count; ++s) p[s] /= sum;
}

HWY_INLINE float reciprocal_rms(VF squares, const AttnResRows& rows) {
  return 1.0f / std::sqrt(sum_of_lanes(squares) / static_cast<float>(rows.size) + rows.eps);
}

template <typename T>
void read(const AttnResRows& rows, int64_t first, int64_t last) {
  std::vector<const T*> v(static_cast<size_t>(rows.sources));
  for (int64_t token = first; token < last; ++token) {
    float* p = rows.p + token * rows.sources;
    for (int64_t s = 0; s < rows.sources; ++s) {
      v[s] = row_of<T>(rows.source[s], token, rows.size);
      VF squares = hn::Zero(DF());
      VF dot = hn::Zero(DF());
      for_each_vector(rows.size, [&](int64_t i, auto part) HWY_ATTR {
        const VF x = load(v[s] + i, part);
        squares = hn::MulAdd(x, x, squares);
        dot = hn::MulAdd(x, load(rows.w + i, part), dot);
      });
      p[s] = sum_of_lanes(dot) * reciprocal_rms(squares, rows);
    }
    softmax(p, rows.sources);
    T* out = row_of<T>(rows.out, token, rows.size);
    for_each_vector(rows.size, [&](int64_t i, auto part) HWY_ATTR {
      VF sum = hn::Mul(hn::Set(DF(), p[0]), load(v[0] + i, part));
      for (int64_t s = 1; s < rows.sources; ++s) {
        sum = hn::MulAdd(hn::Set(DF(), p[s]), load(v[s] + i, part), sum);
      }
      store(sum, out + i, part);
    });
  }
}

/// What the backward pass needs of one source of one token. r, l and p are recomputed, which costs one more product
/// per element in a pass that reads the source anyway, and saves [N, S] of state for each read.
struct SourceTerms {
  float r, logit, dp;
  float on_dout, on_w, on_v;  // dv = on_dout dout + on_w w + on_v v
};

template <typename T>
HWY_INLINE void source_terms(const AttnResRows& rows, const T* v, const T* dout, SourceTerms* terms) {
  VF squares = hn::Zero(DF());
  VF dot = hn::Zero(DF());
  VF dp = hn::Zero(DF());
  for_each_vector(rows.size, [&](int64_t i, auto part) HWY_ATTR {
    const VF x = load(v + i, part);
    squares = hn::MulAdd(x, x, squares);
    dot = hn::MulAdd(x, load(rows.w + i, part), dot);
    dp = hn::MulAdd(x, load(dout + i, part), dp);
  });
  terms->r = reciprocal_rms(squares, rows);
  terms->logit = sum_of_lanes(dot) * terms->r;
  terms->dp = sum_of_lanes(dp);
}

// dl_s = p_s (dp_s - sum p dp);  dv_s = p_s dout + dl_s (r_s w - r_s^2 l_s v_s / D);  dw = sum_s dl_s r_s v_s.
template <typename T>
void read_backward(const AttnResRows& rows, int64_t first, int64_t last, float* dw) {
  std::vector<SourceTerms> terms(static_cast<size_t>(rows.sources));
  std::vector<float> p(static_cast<size_t>(rows.sources));
  for (int64_t token = first; token < last; ++token) {
    const T* dout = row_of<T>(rows.dout, token, rows.size);
    for (int64_t s = 0; s < rows.sources; ++s) {
      source_terms(rows, row_of<T>(rows.source[s], token, rows.size), dout, &terms[s]);
      p[s] = terms[s].logit;
    }
    softmax(p.data(), rows.sources);
    float mean_dp = 0.0f;
    for (int64_t s = 0; s < rows.sources; ++s) mean_dp += p[s] * terms[s].dp;
    for (int64_t s = 0; s < rows.sources; ++s) {
      SourceTerms& term = terms[s];
      const float dlogit = p[s] * (term.dp - mean_dp);
      term.on_dout = p[s];
      term.on_w = dlogit * term.r;
      term.on_v = -dlogit * term.r * term.r * term.logit / static_cast<float>(rows.size);
    }
    for_each_vector(rows.size, [&](int64_t i, auto part) HWY_ATTR {
      const VF d = load(dout + i, part);
      const VF w = load(rows.w + i, part);
      VF dw_sum = load(dw + i, part);
      for (int64_t s = 0; s < rows.sources; ++s) {
        const VF v = load(row_of<T>(rows.source[s], token, rows.size) + i, part);
        const VF on_w = hn::Set(DF(), terms[s].on_w);
        VF dv = hn::Mul(hn::Set(DF(), terms[s].on_dout), d);
        dv = hn::MulAdd(on_w, w, dv);
        dv = hn::MulAdd(hn::Set(DF(), terms[s].on_v), v, dv);
        store(dv, row_of<T>(rows.dsource[s], token, rows.size) + i, part);
        dw_sum = hn::MulAdd(on_w, v, dw_sum);
      }
      store(dw_sum, dw + i, part);
    });
  }
}

AttnResKernels kernels_for(bool bf16) {
  if (bf16) return {read<c10::BFloat16>, read_backward<c10::BFloat16>};
  return {read<float>, read_backward<float>};
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace furlong
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furlong {

HWY_EXPORT(kernels_for);

AttnResKernels attnres_kernels(bool bf16) {
  return HWY_DYNAMIC_DISPATCH(kernels_for)(bf16);
}

}  // namespace furlong
#endif  // HWY_ONCE
