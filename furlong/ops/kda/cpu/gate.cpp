// The decay gates on the CPU, forward and gradient. x = z + dt_bias, a = exp(a_log).
//
//   bounded    g = b sigmoid(a x)      dz = dg b a s (1 - s)     da_log = sum dz x
//   softplus   g = -a softplus(x)      dz = -dg a sigmoid(x)     da_log = sum dg g
//
// Sums over tokens run in blocks of fixed size, so that they do not depend on the number of threads.

#include <cstdint>

#include "furlong/ops/kda/cpu/gate.h"

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/kda/cpu/gate.cpp"
#include "hwy/foreach_target.h"
// clang-format: the line above must come first.
#include "furlong/ops/common/rows-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace furlong::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// exp(-|x|), the number from which sigmoid(x) and its slope follow without overflow or cancellation.
template <class D>
HWY_INLINE hn::Vec<D> decaying(D f32, hn::Vec<D> x) {
  return hn::Exp(f32, hn::Neg(hn::Abs(x)));
}

template <class D>
HWY_INLINE hn::Vec<D> sigmoid(D f32, hn::Vec<D> x) {
  const auto e = decaying(f32, x), one = hn::Set(f32, 1.0f);
  return hn::Div(hn::IfThenElse(hn::Lt(x, hn::Zero(f32)), e, one), hn::Add(one, e));
}

struct Bounded {
  float bound;
  template <class D>
  HWY_INLINE hn::Vec<D> value(D f32, hn::Vec<D> x, hn::Vec<D> a) const {
    return hn::Mul(hn::Set(f32, bound), sigmoid(f32, hn::Mul(a, x)));
  }
  /// dz for dg = 1, and what da_log sums for dg = 1.
  template <class D>
  HWY_INLINE void slopes(D f32, hn::Vec<D> x, hn::Vec<D> a, hn::Vec<D>& d_z, hn::Vec<D>& d_a_log) const {
    const auto e = decaying(f32, hn::Mul(a, x)), sum = hn::Add(e, hn::Set(f32, 1.0f));
    d_z = hn::Div(hn::Mul(hn::Mul(hn::Set(f32, bound), a), e), hn::Mul(sum, sum));
    d_a_log = hn::Mul(d_z, x);
  }
};

struct Softplus {
  template <class D>
  HWY_INLINE hn::Vec<D> value(D f32, hn::Vec<D> x, hn::Vec<D> a) const {
    const auto limit = hn::Set(f32, 20.0f);
    const auto soft = hn::Log1p(f32, hn::Exp(f32, hn::Min(x, limit)));
    return hn::Neg(hn::Mul(a, hn::IfThenElse(hn::Gt(x, limit), x, soft)));
  }
  template <class D>
  HWY_INLINE void slopes(D f32, hn::Vec<D> x, hn::Vec<D> a, hn::Vec<D>& d_z, hn::Vec<D>& d_a_log) const {
    const auto linear = hn::Gt(x, hn::Set(f32, 20.0f));
    d_z = hn::Neg(hn::Mul(a, hn::IfThenElse(linear, hn::Set(f32, 1.0f), sigmoid(f32, x))));
    d_a_log = value(f32, x, a);
  }
};

/// Calls body(tag, n) on all columns of a row, the last ones one by one.
template <typename Body>
HWY_INLINE void for_columns(int64_t columns, const Body& body) {
  const hn::ScalableTag<float> f32;
  const hn::CappedTag<float, 1> one;
  int64_t n = 0;
  for (; n + static_cast<int64_t>(hn::Lanes(f32)) <= columns; n += hn::Lanes(f32)) body(f32, n);
  for (; n < columns; ++n) body(one, n);
}

template <typename T, class Gate>
HWY_INLINE void gate_forward(const kda::GateRows<T>& in, Gate gate, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const T* z = in.z + row * in.columns;
    for_columns(in.columns, [&](auto f32, int64_t n) HWY_ATTR {
      const auto x = hn::Add(load_f32(f32, z + n), hn::LoadU(f32, in.dt_bias + n));
      hn::StoreU(gate.value(f32, x, hn::LoadU(f32, in.a + n)), f32, in.decay_log + row * in.columns + n);
    });
  }
}

template <typename T, class Gate>
HWY_INLINE void gate_backward(const kda::GateRows<T>& in, Gate gate, int64_t first, int64_t last, float* d_dt_bias,
                              float* d_a_log) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t base = row * in.columns;
    for_columns(in.columns, [&](auto f32, int64_t n) HWY_ATTR {
      const auto x = hn::Add(load_f32(f32, in.z + base + n), hn::LoadU(f32, in.dt_bias + n));
      auto slope_z = hn::Zero(f32), slope_a_log = hn::Zero(f32);
      gate.slopes(f32, x, hn::LoadU(f32, in.a + n), slope_z, slope_a_log);
      const auto d_g = hn::LoadU(f32, in.d_decay_log + base + n);
      const auto d_z = hn::Mul(d_g, slope_z);
      store_f32(f32, d_z, in.d_z + base + n);
      hn::StoreU(hn::Add(hn::LoadU(f32, d_dt_bias + n), d_z), f32, d_dt_bias + n);
      hn::StoreU(hn::MulAdd(d_g, slope_a_log, hn::LoadU(f32, d_a_log + n)), f32, d_a_log + n);
    });
  }
}

template <typename T>
HWY_INLINE void forward_rows(const kda::GateRows<T>& in, int64_t first, int64_t last) {
  if (in.bounded) {
    gate_forward(in, Bounded{in.lower_bound}, first, last);
  } else {
    gate_forward(in, Softplus(), first, last);
  }
}

template <typename T>
HWY_INLINE void backward_rows(const kda::GateRows<T>& in, int64_t first, int64_t last, float* d_dt_bias,
                              float* d_a_log) {
  if (in.bounded) {
    gate_backward(in, Bounded{in.lower_bound}, first, last, d_dt_bias, d_a_log);
  } else {
    gate_backward(in, Softplus(), first, last, d_dt_bias, d_a_log);
  }
}

void gate_forward_f32(const kda::GateRows<float>& in, int64_t first, int64_t last) {
  forward_rows(in, first, last);
}
void gate_forward_bf16(const kda::GateRows<c10::BFloat16>& in, int64_t first, int64_t last) {
  forward_rows(in, first, last);
}
void gate_backward_f32(const kda::GateRows<float>& in, int64_t first, int64_t last, float* d_dt_bias, float* d_a_log) {
  backward_rows(in, first, last, d_dt_bias, d_a_log);
}
void gate_backward_bf16(const kda::GateRows<c10::BFloat16>& in, int64_t first, int64_t last, float* d_dt_bias,
                        float* d_a_log) {
  backward_rows(in, first, last, d_dt_bias, d_a_log);
}

}  // namespace furlong::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace furlong {

HWY_EXPORT(gate_forward_f32);
HWY_EXPORT(gate_forward_bf16);
HWY_EXPORT(gate_backward_f32);
HWY_EXPORT(gate_backward_bf16);

namespace kda {

void gate_forward(const GateRows<float>& in, int64_t first, int64_t last) {
  HWY_DYNAMIC_DISPATCH(gate_forward_f32)(in, first, last);
}
void gate_forward(const GateRows<c10::BFloat16>& in, int64_t first, int64_t last) {
  HWY_DYNAMIC_DISPATCH(gate_forward_bf16)(in, first, last);
}
void gate_backward(const GateRows<float>& in, int64_t first, int64_t last, float* d_dt_bias, float* d_a_log) {
  HWY_DYNAMIC_DISPATCH(gate_backward_f32)(in, first, last, d_dt_bias, d_a_log);
}
void gate_backward(const GateRows<c10::BFloat16>& in, int64_t first, int64_t last, float* d_dt_bias, float* d_a_log) {
  HWY_DYNAMIC_DISPATCH(gate_backward_bf16)(in, first, last, d_dt_bias, d_a_log);
}

}  // namespace kda
}  // namespace furlong

#endif  // HWY_ONCE
