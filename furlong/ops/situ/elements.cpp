// Elementwise kernels of the gated activations.
//   t1 = tanh(g / b1)   t2 = tanh(u / b2)   s = sigmoid(g)
//   SiTU    y = b1 t1 s b2 t2   dg = dy b2 t2 ((1 - t1^2) s + b1 t1 s (1 - s))   du = dy b1 t1 s (1 - t2^2)
//   SwiGLU  y = g s u           dg = dy u s (1 + g (1 - s))                      du = dy g s

#include "furlong/ops/situ/elements.h"

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/situ/elements.cpp"
#include <hwy/foreach_target.h>

#include "furlong/ops/common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furlong {
namespace HWY_NAMESPACE {
namespace {  // other operators have functions of the same names

// The factor of `up` and its derivative; kBounded = false: up itself and 1.
struct Linear {
  VF value, slope;
};

template <bool kBounded>
HWY_INLINE Linear linear_factor(VF up, float beta) {
  const DF d;
  if constexpr (!kBounded) return {up, hn::Set(d, 1.0f)};
  const VF t = tanh_of(hn::Mul(up, hn::Set(d, 1.0f / beta)));
  return {hn::Mul(t, hn::Set(d, beta)), hn::NegMulAdd(t, t, hn::Set(d, 1.0f))};
}

template <typename T, bool kBounded>
void situ_loop(const GluElements& glu, int64_t first, int64_t last) {
  const T* gate = static_cast<const T*>(glu.gate) + first;
  const T* up = static_cast<const T*>(glu.up) + first;
  T* y = static_cast<T*>(glu.y) + first;
  const VF beta = hn::Set(DF(), glu.beta);
  const VF inverse_beta = hn::Set(DF(), 1.0f / glu.beta);
  for_each_vector(last - first, [&](int64_t i, auto part) HWY_ATTR {
    const VF g = load(gate + i, part);
    const VF bounded = hn::Mul(beta, tanh_of(hn::Mul(g, inverse_beta)));
    const Linear linear = linear_factor<kBounded>(load(up + i, part), glu.linear_beta);
    store(hn::Mul(hn::Mul(bounded, sigmoid_of(g)), linear.value), y + i, part);
  });
}

template <typename T, bool kBounded>
void situ_backward_loop(const GluElements& glu, int64_t first, int64_t last) {
  const T* gate = static_cast<const T*>(glu.gate) + first;
  const T* up = static_cast<const T*>(glu.up) + first;
  const T* dy = static_cast<const T*>(glu.dy) + first;
  T* dgate = static_cast<T*>(glu.dgate) + first;
  T* dup = static_cast<T*>(glu.dup) + first;
  const VF one = hn::Set(DF(), 1.0f);
  const VF beta = hn::Set(DF(), glu.beta);
  const VF inverse_beta = hn::Set(DF(), 1.0f / glu.beta);
  for_each_vector(last - first, [&](int64_t i, auto part) HWY_ATTR {
    const VF g = load(gate + i, part);
    const VF d = load(dy + i, part);
    const VF t = tanh_of(hn::Mul(g, inverse_beta));
    const VF s = sigmoid_of(g);
    const VF bounded = hn::Mul(beta, t);
    const Linear linear = linear_factor<kBounded>(load(up + i, part), glu.linear_beta);
    const VF slope = hn::Mul(s, hn::MulAdd(bounded, hn::Sub(one, s), hn::NegMulAdd(t, t, one)));
    store(hn::Mul(hn::Mul(d, linear.value), slope), dgate + i, part);
    store(hn::Mul(hn::Mul(d, hn::Mul(bounded, s)), linear.slope), dup + i, part);
  });
}

template <typename T>
void situ(const GluElements& glu, int64_t first, int64_t last) {
  glu.linear_beta == 0.0f ? situ_loop<T, false>(glu, first, last) : situ_loop<T, true>(glu, first, last);
}

template <typename T>
void situ_backward(const GluElements& glu, int64_t first, int64_t last) {
  glu.linear_beta == 0.0f ? situ_backward_loop<T, false>(glu, first, last)
                          : situ_backward_loop<T, true>(glu, first, last);
}

template <typename T>
void swiglu(const GluElements& glu, int64_t first, int64_t last) {
  const T* gate = static_cast<const T*>(glu.gate) + first;
  const T* up = static_cast<const T*>(glu.up) + first;
  T* y = static_cast<T*>(glu.y) + first;
  for_each_vector(last - first, [&](int64_t i, auto part) HWY_ATTR {
    const VF g = load(gate + i, part);
    store(hn::Mul(hn::Mul(g, sigmoid_of(g)), load(up + i, part)), y + i, part);
  });
}

template <typename T>
void swiglu_backward(const GluElements& glu, int64_t first, int64_t last) {
  const T* gate = static_cast<const T*>(glu.gate) + first;
  const T* up = static_cast<const T*>(glu.up) + first;
  const T* dy = static_cast<const T*>(glu.dy) + first;
  T* dgate = static_cast<T*>(glu.dgate) + first;
  T* dup = static_cast<T*>(glu.dup) + first;
  const VF one = hn::Set(DF(), 1.0f);
  for_each_vector(last - first, [&](int64_t i, auto part) HWY_ATTR {
    const VF g = load(gate + i, part);
    const VF d = load(dy + i, part);
    const VF s = sigmoid_of(g);
    const VF slope = hn::Mul(s, hn::MulAdd(g, hn::Sub(one, s), one));
    store(hn::Mul(hn::Mul(d, load(up + i, part)), slope), dgate + i, part);
    store(hn::Mul(d, hn::Mul(g, s)), dup + i, part);
  });
}

template <typename T>
GluKernels kernels_of() {
  return {situ<T>, swiglu<T>, situ_backward<T>, swiglu_backward<T>};
}

GluKernels kernels_for(bool bf16) {
  return bf16 ? kernels_of<c10::BFloat16>() : kernels_of<float>();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace furlong
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furlong {

HWY_EXPORT(kernels_for);

GluKernels glu_kernels(bool bf16) {
  return HWY_DYNAMIC_DISPATCH(kernels_for)(bf16);
}

}  // namespace furlong
#endif  // HWY_ONCE
