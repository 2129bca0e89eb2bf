// The decay gates on CPU tensors and their gradients. fp64 and other devices run the tensor-operation forms.
//   N packed tokens   H heads   K key size

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "furlong/base/parallel.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/kda/cpu/gate.h"
#include "furlong/ops/kda/internal.h"

namespace furlong::kda {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows whose parameter gradients are summed in fp32 before the blocks' sums are added up.
constexpr int64_t kGateBlockRows = 64;

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using GateSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, double);
using SoftplusSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&);
using GradientSignature = Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double);

/// lower_bound 0 stands for the softplus gate, here and in the gradient's schema.
template <typename T>
GateRows<T> gate_rows(const at::Tensor& z, const at::Tensor& a_HK, const at::Tensor& dt_bias, double lower_bound) {
  return {lower_bound < 0,
          static_cast<float>(lower_bound),
          a_HK.numel(),
          z.const_data_ptr<T>(),
          a_HK.const_data_ptr<float>(),
          dt_bias.const_data_ptr<float>(),
          nullptr,
          nullptr,
          nullptr};
}

at::Tensor spread(const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK) {
  return a_log_H.exp().unsqueeze(-1).expand_as(dt_bias_HK).contiguous();
}

at::Tensor run_forward(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK,
                       double lower_bound) {
  const at::Tensor z = z_NHK.contiguous(), a = spread(a_log_H, dt_bias_HK), dt_bias = dt_bias_HK.contiguous();
  const at::Tensor decay_log = at::empty(z.sizes(), z.options().dtype(at::kFloat));
  const auto run = [&](auto zero) {
    auto rows = gate_rows<decltype(zero)>(z, a, dt_bias, lower_bound);
    rows.decay_log = decay_log.mutable_data_ptr<float>();
    parallel_for(0, z.size(0), kGateBlockRows, [&](int64_t first, int64_t last) { gate_forward(rows, first, last); });
  };
  if (z.scalar_type() == at::kBFloat16) {
    run(c10::BFloat16());
  } else {
    run(0.0f);
  }
  return decay_log;
}

at::Tensor bounded_cpu(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK,
                       double lower_bound) {
  return has_cpu_kernel(z_NHK) ? run_forward(z_NHK, a_log_H, dt_bias_HK, lower_bound)
                               : gate_bounded_reference(z_NHK, a_log_H, dt_bias_HK, lower_bound);
}

at::Tensor softplus_cpu(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK) {
  return has_cpu_kernel(z_NHK) ? run_forward(z_NHK, a_log_H, dt_bias_HK, 0)
                               : gate_softplus_reference(z_NHK, a_log_H, dt_bias_HK);
}

Gradients backward_cpu(const at::Tensor& d_decay_log_NHK, const at::Tensor& z_NHK, const at::Tensor& a_log_H,
                       const at::Tensor& dt_bias_HK, double lower_bound) {
  const at::Tensor z = z_NHK.contiguous(), a = spread(a_log_H, dt_bias_HK), dt_bias = dt_bias_HK.contiguous();
  const at::Tensor d_decay_log = d_decay_log_NHK.contiguous();
  const at::Tensor d_z = at::empty(z.sizes(), z.options());
  const int64_t columns = a.numel(), blocks = (z.size(0) + kGateBlockRows - 1) / kGateBlockRows;
  const at::Tensor sums = at::zeros({2, blocks, columns}, a.options());
  float* dt_bias_sums = sums.mutable_data_ptr<float>();
  float* a_log_sums = dt_bias_sums + blocks * columns;
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    auto rows = gate_rows<T>(z, a, dt_bias, lower_bound);
    rows.d_decay_log = d_decay_log.const_data_ptr<float>();
    rows.d_z = d_z.mutable_data_ptr<T>();
    parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        const int64_t end = std::min((block + 1) * kGateBlockRows, z.size(0));
        gate_backward(rows, block * kGateBlockRows, end, dt_bias_sums + block * columns, a_log_sums + block * columns);
      }
    });
  };
  if (z.scalar_type() == at::kBFloat16) {
    run(c10::BFloat16());
  } else {
    run(0.0f);
  }
  const at::Tensor totals = sums.sum(1);
  return {d_z, totals[1].view(dt_bias.sizes()).sum(-1), totals[0].view(dt_bias.sizes())};
}

class GateFunction : public torch::autograd::Function<GateFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& z_NHK, const at::Tensor& a_log_H,
                            const at::Tensor& dt_bias_HK, double lower_bound) {
    static const auto bounded = find_op<GateSignature>("furlong::kda_gate_bounded");
    static const auto softplus = find_op<SoftplusSignature>("furlong::kda_gate_softplus");
    at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({z_NHK, a_log_H, dt_bias_HK});
    context->saved_data["lower_bound"] = lower_bound;
    return lower_bound < 0 ? bounded.call(z_NHK, a_log_H, dt_bias_HK, lower_bound)
                           : softplus.call(z_NHK, a_log_H, dt_bias_HK);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op = find_op<GradientSignature>("furlong::_kda_gate_backward");
    const variable_list saved = context->get_saved_variables();
    auto [d_z, d_a_log, d_dt_bias] =
        op.call(gradients[0], saved[0], saved[1], saved[2], context->saved_data["lower_bound"].toDouble());
    return {d_z, d_a_log, d_dt_bias, {}};
  }
};

at::Tensor bounded_autograd(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK,
                            double lower_bound) {
  if (has_kernel(z_NHK)) return GateFunction::apply(z_NHK, a_log_H, dt_bias_HK, lower_bound);
  return gate_bounded_reference(z_NHK, a_log_H, dt_bias_HK, lower_bound);
}

at::Tensor softplus_autograd(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK) {
  if (has_kernel(z_NHK)) return GateFunction::apply(z_NHK, a_log_H, dt_bias_HK, 0.0);
  return gate_softplus_reference(z_NHK, a_log_H, dt_bias_HK);
}

}  // namespace

}  // namespace furlong::kda

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("kda_gate_bounded", furlong::kda::bounded_cpu);
  m.impl("kda_gate_softplus", furlong::kda::softplus_cpu);
  m.impl("_kda_gate_backward", furlong::kda::backward_cpu);
}

TORCH_LIBRARY_IMPL(furlong, Autograd, m) {
  m.impl("kda_gate_bounded", furlong::kda::bounded_autograd);
  m.impl("kda_gate_softplus", furlong::kda::softplus_autograd);
}
