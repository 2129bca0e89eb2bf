// kda_step_ on the CPU: one token of each sequence, the state updated where it lies. Memory-bound: the state is read
// twice (the second time out of the cache) and written once. With S' = diag(decay) S and w = beta (v - S'^T k),
//
//   out = scale (S' + k w^T)^T q = S'^T (scale q) + (scale q . k) w
//
// so that one reading pass gives both S'^T k and S'^T q, and the second pass only writes S' + k w^T.

#include "furlong/base/parallel.h"
#include "furlong/ops/kda/cpu/args.h"

#include "furlong/ops/common/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "furlong/ops/kda/cpu/step.cpp"
#include "hwy/foreach_target.h"
// clang-format: the line above must come first.
#include "furlong/ops/common/rows-inl.h"
#include "furlong/ops/kda/cpu/step.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace furlong::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// One head's token as fp32 vectors; decayed_k = exp(decay_log) k, decayed_q likewise with the scale.
struct HeadToken {
  std::vector<float> decay, k, decayed_k, decayed_q, v, out;
  float beta = 0, q_dot_k = 0;
};

/// Asks for every other vector of a row of the next state: both passes over this one keep the memory busy.
template <int kVectors, class D>
HWY_INLINE void prefetch_half(D f32, const float* row, int first) {
#pragma GCC unroll 4
  for (int j = first; j < kVectors; j += 2) __builtin_prefetch(row + j * hn::Lanes(f32), 0, 2);
}

template <int kVectors, class D>
HWY_INLINE void step_columns(D f32, const HeadToken& token, int64_t K, int64_t V, int64_t column, float* state,
                             const float* next, float* out) {
  using Vec = hn::Vec<D>;
  const int64_t lanes = hn::Lanes(f32);
  Vec recalled[kVectors], read[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) recalled[j] = read[j] = hn::Zero(f32);
  for (int64_t d = 0; d < K; ++d) {
    const Vec k = hn::Set(f32, token.decayed_k[d]), q = hn::Set(f32, token.decayed_q[d]);
    prefetch_half<kVectors>(f32, next + d * V + column, 0);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const Vec s = hn::LoadU(f32, state + d * V + column + j * lanes);
      recalled[j] = hn::MulAdd(k, s, recalled[j]);
      read[j] = hn::MulAdd(q, s, read[j]);
    }
  }
  Vec write[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    const Vec v = hn::LoadU(f32, token.v.data() + column + j * lanes);
    write[j] = hn::Mul(hn::Set(f32, token.beta), hn::Sub(v, recalled[j]));
    hn::StoreU(hn::MulAdd(hn::Set(f32, token.q_dot_k), write[j], read[j]), f32, out + column + j * lanes);
  }
  for (int64_t d = 0; d < K; ++d) {
    const Vec decay = hn::Set(f32, token.decay[d]), k = hn::Set(f32, token.k[d]);
    prefetch_half<kVectors>(f32, next + d * V + column, 1);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      float* s = state + d * V + column + j * lanes;
      hn::StoreU(hn::MulAdd(k, write[j], hn::Mul(decay, hn::LoadU(f32, s))), f32, s);
    }
  }
}

template <typename T>
HWY_INLINE void load_token(const kda::StepArguments<T>& in, int64_t b, int64_t h, HeadToken& token) {
  const hn::ScalableTag<float> f32;
  const int64_t K = in.key_size, padded = static_cast<int64_t>(token.decay.size());
  load_rows(in.decay_log.at(b, h), 0, 1, K, token.decay.data(), 1, padded);
  load_rows(in.k.at(b, h), 0, 1, K, token.k.data(), 1, padded);
  load_rows(in.q.at(b, h), 0, 1, K, token.decayed_q.data(), 1, padded);
  load_rows(in.v.at(b, h), 0, 1, in.value_size, token.v.data(), 1, static_cast<int64_t>(token.v.size()));
  token.beta = *in.beta.at(b, h);
  auto dot = hn::Zero(f32);
  for (int64_t d = 0; d < padded; d += hn::Lanes(f32)) {
    const auto decay = hn::Exp(f32, hn::LoadU(f32, token.decay.data() + d));
    const auto k = hn::LoadU(f32, token.k.data() + d);
    const auto q = hn::Mul(hn::Set(f32, in.scale), hn::LoadU(f32, token.decayed_q.data() + d));
    dot = hn::MulAdd(q, k, dot);
    hn::StoreU(decay, f32, token.decay.data() + d);
    hn::StoreU(hn::Mul(decay, k), f32, token.decayed_k.data() + d);
    hn::StoreU(hn::Mul(decay, q), f32, token.decayed_q.data() + d);
  }
  token.q_dot_k = hn::GetLane(hn::SumOfLanes(f32, dot));
}

template <typename T>
void step_heads(const kda::StepArguments<T>& in, int64_t first, int64_t last) {
  const hn::ScalableTag<float> f32;
  const hn::CappedTag<float, 1> one;
  const int64_t lanes = hn::Lanes(f32), K = in.key_size, V = in.value_size;
  HeadToken token;
  const int64_t padded = kda::round_up(K, kda::kBlockRows);
  for (auto* vector : {&token.decay, &token.k, &token.decayed_k, &token.decayed_q}) vector->resize(padded);
  token.v.resize(V);
  token.out.resize(V);
  for (int64_t n = first; n < last; ++n) {
    const int64_t b = n / in.heads, h = n % in.heads;
    load_token(in, b, h, token);
    const auto state_of = [&](int64_t item) {
      return in.state + (in.slots[item / in.heads] * in.heads + item % in.heads) * K * V;
    };
    float* state = state_of(n);
    const float* next = state_of(std::min(n + 1, last - 1));
    int64_t column = 0;
    for (; column + 4 * lanes <= V; column += 4 * lanes) {
      step_columns<4>(f32, token, K, V, column, state, next, token.out.data());
    }
    for (; column + lanes <= V; column += lanes) {
      step_columns<1>(f32, token, K, V, column, state, next, token.out.data());
    }
    for (; column < V; ++column) step_columns<1>(one, token, K, V, column, state, next, token.out.data());
    store_rows(token.out.data(), V, 1, V, in.out.at(b, h), 0);
  }
}

void step_f32(const kda::StepArguments<float>& in, int64_t first, int64_t last) {
  step_heads(in, first, last);
}
void step_bf16(const kda::StepArguments<c10::BFloat16>& in, int64_t first, int64_t last) {
  step_heads(in, first, last);
}

}  // namespace furlong::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <ATen/ops/empty.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/kda/internal.h"

namespace furlong {

HWY_EXPORT(step_f32);
HWY_EXPORT(step_bf16);

namespace kda {

namespace {

void run_heads(const StepArguments<float>& in, int64_t first, int64_t last) {
  HWY_DYNAMIC_DISPATCH(step_f32)(in, first, last);
}

void run_heads(const StepArguments<c10::BFloat16>& in, int64_t first, int64_t last) {
  HWY_DYNAMIC_DISPATCH(step_bf16)(in, first, last);
}

template <typename T>
void run_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& decay_log,
              const at::Tensor& beta, const at::Tensor& state, const at::Tensor& slots, const at::Tensor& out,
              double scale) {
  const auto rows = [](const at::Tensor& x, auto zero) {
    using Element = decltype(zero);
    return TokenRows<const Element>{x.const_data_ptr<Element>(), x.stride(0), x.stride(1)};
  };
  const StepArguments<T> in{q.size(1),
                            q.size(2),
                            v.size(2),
                            static_cast<float>(scale),
                            rows(q, T()),
                            rows(k, T()),
                            rows(v, T()),
                            rows(decay_log, 0.0f),
                            rows(beta, 0.0f),
                            state.mutable_data_ptr<float>(),
                            slots.const_data_ptr<int64_t>(),
                            {out.mutable_data_ptr<T>(), out.stride(0), out.stride(1)}};
  parallel_for(0, q.size(0) * q.size(1), 1, [&](int64_t first, int64_t last) { run_heads(in, first, last); });
}

at::Tensor step_cpu(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                    const at::Tensor& decay_log_BHK, const at::Tensor& beta_BH, at::Tensor state_SHKV,
                    const at::Tensor& slots_B, double scale) {
  if (!has_cpu_kernel(q_BHK)) {
    return step_reference(q_BHK, k_BHK, v_BHV, decay_log_BHK, beta_BH, state_SHKV, slots_B, scale);
  }
  const at::Tensor slots = slots_B.contiguous();
  const auto* slot = slots.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < slots.numel(); ++b) {
    check_argument(
        slot[b] >= 0 && slot[b] < state_SHKV.size(0), "kda_step_",
        "slots_B: got " + std::to_string(slot[b]) + ", need a slot of a pool of " + std::to_string(state_SHKV.size(0)));
  }
  const at::Tensor out = at::empty(v_BHV.sizes(), v_BHV.options());
  const auto run = [&](auto zero) {
    run_step<decltype(zero)>(q_BHK.contiguous(), k_BHK.contiguous(), v_BHV.contiguous(), decay_log_BHK.contiguous(),
                             beta_BH, state_SHKV, slots, out, scale);
  };
  if (v_BHV.scalar_type() == at::kBFloat16) {
    run(c10::BFloat16());
  } else {
    run(0.0f);
  }
  return out;
}

}  // namespace

}  // namespace kda
}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("kda_step_", furlong::kda::step_cpu);
}

#endif  // HWY_ONCE
