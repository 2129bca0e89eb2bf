// Row kernels of the norms. Each row is read twice, the second time out of L1: once for its statistics, once for the
// result. x r is called n below.

#include "furlong/ops/norm/rows.h"

#include <cmath>
#include <vector>

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/norm/rows.cpp"
#include <hwy/foreach_target.h>

#include "furlong/ops/common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furlong {
namespace HWY_NAMESPACE {
namespace {  // other operators have functions of the same names

template <typename T>
HWY_INLINE float sum_of_squares(const T* x, int64_t size) {
  VF sum = hn::Zero(DF());
  for_each_vector(size, [&](int64_t i, auto part) HWY_ATTR {
    const VF v = load(x + i, part);
    sum = hn::MulAdd(v, v, sum);
  });
  return sum_of_lanes(sum);
}

HWY_INLINE float reciprocal_rms(float sum, const NormRows& norm) {
  return 1.0f / std::sqrt(sum / static_cast<float>(norm.size) + norm.eps);
}

template <typename T>
struct Row {
  Row(const NormRows& norm, int64_t row)
      : x(start<const T>(norm.x, row, norm.size)),
        gate(start<const T>(norm.gate, row, norm.size)),
        dy(start<const T>(norm.dy, row, norm.size)),
        y(start<T>(norm.y, row, norm.size)),
        dx(start<T>(norm.dx, row, norm.size)),
        dgate(start<T>(norm.dgate, row, norm.size)) {}

  template <typename Element, typename Void>
  static Element* start(Void* data, int64_t row, int64_t size) {
    return data == nullptr ? nullptr : static_cast<Element*>(data) + row * size;
  }

  const T *x, *gate, *dy;
  T *y, *dx, *dgate;
};

template <typename T>
void rms_norm(const NormRows& norm, int64_t first, int64_t last) {
  for (int64_t index = first; index < last; ++index) {
    const Row<T> row(norm, index);
    const VF r = hn::Set(DF(), reciprocal_rms(sum_of_squares(row.x, norm.size), norm));
    for_each_vector(norm.size, [&](int64_t i, auto part) HWY_ATTR {
      const VF n = round_to(hn::Mul(load(row.x + i, part), r), T());
      store(hn::Mul(n, load(norm.weight + i, part)), row.y + i, part);
    });
  }
}

// dx = r (c - n mean(c n)), c = dy w;  dw += dy n.
template <typename T>
void rms_norm_backward(const NormRows& norm, int64_t first, int64_t last, float* dweight) {
  for (int64_t index = first; index < last; ++index) {
    const Row<T> row(norm, index);
    VF squares = hn::Zero(DF());
    VF dot = hn::Zero(DF());
    for_each_vector(norm.size, [&](int64_t i, auto part) HWY_ATTR {
      const VF x = load(row.x + i, part);
      squares = hn::MulAdd(x, x, squares);
      dot = hn::MulAdd(hn::Mul(load(row.dy + i, part), load(norm.weight + i, part)), x, dot);
    });
    const float r = reciprocal_rms(sum_of_lanes(squares), norm);
    const VF r_all = hn::Set(DF(), r);
    const VF mean = hn::Set(DF(), sum_of_lanes(dot) * r / static_cast<float>(norm.size));
    for_each_vector(norm.size, [&](int64_t i, auto part) HWY_ATTR {
      const VF n = hn::Mul(load(row.x + i, part), r_all);
      const VF dy = load(row.dy + i, part);
      const VF c = hn::Mul(dy, load(norm.weight + i, part));
      store(hn::Mul(r_all, hn::NegMulAdd(n, mean, c)), row.dx + i, part);
      store(hn::MulAdd(dy, round_to(n, T()), load(dweight + i, part)), dweight + i, part);
    });
  }
}

template <typename T>
void gated_rms_norm(const NormRows& norm, int64_t first, int64_t last) {
  for (int64_t index = first; index < last; ++index) {
    const Row<T> row(norm, index);
    const VF r = hn::Set(DF(), reciprocal_rms(sum_of_squares(row.x, norm.size), norm));
    for_each_vector(norm.size, [&](int64_t i, auto part) HWY_ATTR {
      const VF n = hn::Mul(load(row.x + i, part), r);
      const VF gate = sigmoid_of(load(row.gate + i, part));
      store(hn::Mul(hn::Mul(n, load(norm.weight + i, part)), gate), row.y + i, part);
    });
  }
}

// With s = sigmoid(z), c = dy w s: dx = r (c - n mean(c n)), dz = dy n w s (1 - s), dw += dy n s. The first pass parks
// s in a row of scratch, so that the exponential is taken once.
template <typename T>
void gated_rms_norm_backward(const NormRows& norm, int64_t first, int64_t last, float* dweight) {
  std::vector<float> gates(static_cast<size_t>(norm.size));
  for (int64_t index = first; index < last; ++index) {
    const Row<T> row(norm, index);
    VF squares = hn::Zero(DF());
    VF dot = hn::Zero(DF());
    for_each_vector(norm.size, [&](int64_t i, auto part) HWY_ATTR {
      const VF x = load(row.x + i, part);
      const VF s = sigmoid_of(load(row.gate + i, part));
      store(s, gates.data() + i, part);
      squares = hn::MulAdd(x, x, squares);
      dot = hn::MulAdd(hn::Mul(hn::Mul(load(row.dy + i, part), load(norm.weight + i, part)), s), x, dot);
    });
    const float r = reciprocal_rms(sum_of_lanes(squares), norm);
    const VF r_all = hn::Set(DF(), r);
    const VF mean = hn::Set(DF(), sum_of_lanes(dot) * r / static_cast<float>(norm.size));
    for_each_vector(norm.size, [&](int64_t i, auto part) HWY_ATTR {
      const VF n = hn::Mul(load(row.x + i, part), r_all);
      const VF s = load(gates.data() + i, part);
      const VF dy_s = hn::Mul(load(row.dy + i, part), s);
      const VF c = hn::Mul(dy_s, load(norm.weight + i, part));
      store(hn::Mul(r_all, hn::NegMulAdd(n, mean, c)), row.dx + i, part);
      store(hn::Mul(hn::Mul(c, n), hn::Sub(hn::Set(DF(), 1.0f), s)), row.dgate + i, part);
      store(hn::MulAdd(dy_s, n, load(dweight + i, part)), dweight + i, part);
    });
  }
}

template <typename T>
void l2_norm(const NormRows& norm, int64_t first, int64_t last) {
  for (int64_t index = first; index < last; ++index) {
    const Row<T> row(norm, index);
    const VF r = hn::Set(DF(), 1.0f / std::sqrt(sum_of_squares(row.x, norm.size) + norm.eps));
    for_each_vector(norm.size,
                    [&](int64_t i, auto part) HWY_ATTR { store(hn::Mul(load(row.x + i, part), r), row.y + i, part); });
  }
}

// dx = r (dy - n (n . dy)).
template <typename T>
void l2_norm_backward(const NormRows& norm, int64_t first, int64_t last, float*) {
  for (int64_t index = first; index < last; ++index) {
    const Row<T> row(norm, index);
    VF squares = hn::Zero(DF());
    VF dot = hn::Zero(DF());
    for_each_vector(norm.size, [&](int64_t i, auto part) HWY_ATTR {
      const VF x = load(row.x + i, part);
      squares = hn::MulAdd(x, x, squares);
      dot = hn::MulAdd(load(row.dy + i, part), x, dot);
    });
    const float r = 1.0f / std::sqrt(sum_of_lanes(squares) + norm.eps);
    const VF r_all = hn::Set(DF(), r);
    const VF along = hn::Set(DF(), sum_of_lanes(dot) * r);
    for_each_vector(norm.size, [&](int64_t i, auto part) HWY_ATTR {
      const VF n = hn::Mul(load(row.x + i, part), r_all);
      store(hn::Mul(r_all, hn::NegMulAdd(n, along, load(row.dy + i, part))), row.dx + i, part);
    });
  }
}

template <typename T>
NormKernels kernels_of() {
  return {rms_norm<T>,          gated_rms_norm<T>,          l2_norm<T>,
          rms_norm_backward<T>, gated_rms_norm_backward<T>, l2_norm_backward<T>};
}

NormKernels kernels_for(bool bf16) {
  return bf16 ? kernels_of<c10::BFloat16>() : kernels_of<float>();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace furlong
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furlong {

HWY_EXPORT(kernels_for);

NormKernels norm_kernels(bool bf16) {
  return HWY_DYNAMIC_DISPATCH(kernels_for)(bf16);
}

}  // namespace furlong
#endif  // HWY_ONCE
