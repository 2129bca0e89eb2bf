// kda_step_, kda_step_fused_ and the gates on CUDA tensors: from tensors to the launchers' arguments.
//   B sequences   S state slots   N packed tokens   H heads   K key size   V value size

#include <ATen/ops/empty.h>

#include "furlong/ops/common/cuda_launch.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/kda/cuda/args.h"
#include "furlong/ops/kda/cuda/gate.h"
#include "furlong/ops/kda/internal.h"

namespace furlong::kda {

namespace {

constexpr int64_t kMaxKeys = 256;

cuda::Element element_of(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? cuda::Element::kBFloat16 : cuda::Element::kFloat;
}

cuda::Rows rows_of(const at::Tensor& x) {
  return {x.const_data_ptr(), x.stride(0), x.stride(1), element_of(x)};
}

bool has_step_kernel(const at::Tensor& q_BHK, const at::Tensor& v_BHV, const at::Tensor& gate_BHK) {
  const auto ours = [](const at::Tensor& x) { return x.scalar_type() == at::kFloat || is_bf16(x); };
  return ours(q_BHK) && ours(v_BHV) && ours(gate_BHK) && q_BHK.size(2) <= kMaxKeys;
}

/// A step's tensors, kept alive for the pointers of its arguments.
struct HeldStep {
  at::Tensor q, k, v, gate, beta, slots, out;
  cuda::StepArgs args;

  HeldStep(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV, const at::Tensor& gate_BHK,
           const at::Tensor& beta_BH, const at::Tensor& state_SHKV, const at::Tensor& slots_B, double scale)
      : q(with_adjacent_columns(q_BHK)),
        k(with_adjacent_columns(k_BHK)),
        v(with_adjacent_columns(v_BHV)),
        gate(with_adjacent_columns(gate_BHK)),
        beta(beta_BH),
        slots(slots_B.contiguous()),
        out(at::empty(v_BHV.sizes(), v_BHV.options())) {
    for (const at::Tensor* x : std::initializer_list<const at::Tensor*>{&k, &v, &gate, &beta, &state_SHKV, &slots}) {
      check_same_device("kda_step_", "inputs", *x, q);
    }
    check_argument(state_SHKV.is_contiguous(), "kda_step_", "state_SHKV: need a contiguous pool");
    cuda::Inputs& in = args.in;
    in.q_NHK = rows_of(q), in.k_NHK = rows_of(k), in.v_NHV = rows_of(v), in.gate_NHK = rows_of(gate);
    in.beta_NH = rows_of(beta);
    in.scale = static_cast<float>(scale);
    in.sequences = in.tokens = q.size(0), in.heads = q.size(1), in.key_size = q.size(2), in.value_size = v.size(2);
    args.state_SHKV = state_SHKV.mutable_data_ptr<float>();
    args.slots = state_SHKV.size(0);
    args.slots_B = slots.const_data_ptr<int64_t>();
    args.out_BHV = out.mutable_data_ptr();
    args.stream = c10::cuda::getCurrentCUDAStream();
  }
  at::Tensor run(const char* op) {
    check_launch(op, cuda::launch_step(args));
    return out;
  }
};

at::Tensor step_cuda(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                     const at::Tensor& decay_log_BHK, const at::Tensor& beta_BH, at::Tensor state_SHKV,
                     const at::Tensor& slots_B, double scale) {
  check_step("kda_step_", q_BHK, k_BHK, v_BHV, decay_log_BHK, beta_BH, state_SHKV, slots_B);
  if (!has_step_kernel(q_BHK, v_BHV, decay_log_BHK)) {
    return step_reference(q_BHK, k_BHK, v_BHV, decay_log_BHK, beta_BH, state_SHKV, slots_B, scale);
  }
  const c10::cuda::CUDAGuard guard(q_BHK.device());
  return HeldStep(q_BHK, k_BHK, v_BHV, decay_log_BHK, beta_BH, state_SHKV, slots_B, scale).run("kda_step_");
}

cuda::GateForm form_of(double lower_bound) {
  return lower_bound < 0 ? cuda::GateForm::kBounded : cuda::GateForm::kSoftplus;
}

at::Tensor step_fused_cuda(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                           const at::Tensor& z_BHK, const at::Tensor& beta_logit_BH, const at::Tensor& a_log_H,
                           const at::Tensor& dt_bias_HK, at::Tensor state_SHKV, const at::Tensor& slots_B,
                           double lower_bound, double scale) {
  check_step_fused(q_BHK, k_BHK, v_BHV, z_BHK, beta_logit_BH, a_log_H, dt_bias_HK, state_SHKV, slots_B);
  if (!has_step_kernel(q_BHK, v_BHV, z_BHK)) {
    return step_fused_composed(q_BHK, k_BHK, v_BHV, z_BHK, beta_logit_BH, a_log_H, dt_bias_HK, state_SHKV, slots_B,
                               lower_bound, scale);
  }
  const c10::cuda::CUDAGuard guard(q_BHK.device());
  const at::Tensor a_log = a_log_H.contiguous(), dt_bias = dt_bias_HK.contiguous();
  check_same_device("kda_step_fused_", "a_log_H", a_log, q_BHK);
  check_same_device("kda_step_fused_", "dt_bias_HK", dt_bias, q_BHK);
  HeldStep held(q_BHK, k_BHK, v_BHV, z_BHK, beta_logit_BH, state_SHKV, slots_B, scale);
  cuda::Inputs& in = held.args.in;
  in.gate_form = form_of(lower_bound);
  in.lower_bound = static_cast<float>(lower_bound);
  in.beta_is_logit = in.l2_norm = true;
  in.a_log_H = a_log.const_data_ptr<float>(), in.dt_bias_HK = dt_bias.const_data_ptr<float>();
  return held.run("kda_step_fused_");
}

/// The gate's tensors, contiguous, kept alive for the pointers of the arguments.
struct HeldGate {
  at::Tensor z, a_log, dt_bias;
  cuda::GateArgs args;

  HeldGate(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK, double lower_bound)
      : z(z_NHK.contiguous()), a_log(a_log_H.contiguous()), dt_bias(dt_bias_HK.contiguous()) {
    check_same_device("kda_gate", "a_log_H", a_log, z);
    check_same_device("kda_gate", "dt_bias_HK", dt_bias, z);
    args = {z.size(0),
            z.size(1),
            z.size(2),
            element_of(z),
            z.const_data_ptr(),
            a_log.const_data_ptr<float>(),
            dt_bias.const_data_ptr<float>(),
            form_of(lower_bound),
            static_cast<float>(lower_bound),
            c10::cuda::getCurrentCUDAStream()};
  }
};

at::Tensor run_gate(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK,
                    double lower_bound) {
  const c10::cuda::CUDAGuard guard(z_NHK.device());
  const HeldGate held(z_NHK, a_log_H, dt_bias_HK, lower_bound);
  const at::Tensor decay_log = at::empty(z_NHK.sizes(), z_NHK.options().dtype(at::kFloat));
  check_launch("kda_gate", cuda::launch_gate(held.args, decay_log.mutable_data_ptr<float>()));
  return decay_log;
}

at::Tensor bounded_cuda(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK,
                        double lower_bound) {
  return has_kernel(z_NHK) ? run_gate(z_NHK, a_log_H, dt_bias_HK, lower_bound)
                           : gate_bounded_reference(z_NHK, a_log_H, dt_bias_HK, lower_bound);
}

at::Tensor softplus_cuda(const at::Tensor& z_NHK, const at::Tensor& a_log_H, const at::Tensor& dt_bias_HK) {
  return has_kernel(z_NHK) ? run_gate(z_NHK, a_log_H, dt_bias_HK, 0)
                           : gate_softplus_reference(z_NHK, a_log_H, dt_bias_HK);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gate_backward_cuda(const at::Tensor& d_decay_log_NHK,
                                                                  const at::Tensor& z_NHK, const at::Tensor& a_log_H,
                                                                  const at::Tensor& dt_bias_HK, double lower_bound) {
  const c10::cuda::CUDAGuard guard(z_NHK.device());
  const HeldGate held(z_NHK, a_log_H, dt_bias_HK, lower_bound);
  const at::Tensor d_decay_log = d_decay_log_NHK.contiguous();
  const at::Tensor d_z = at::empty(z_NHK.sizes(), z_NHK.options());
  const at::Tensor d_a_log = at::empty(a_log_H.sizes(), a_log_H.options());
  const at::Tensor d_dt_bias = at::empty(dt_bias_HK.sizes(), dt_bias_HK.options());
  const at::Tensor workspace = at::empty({cuda::gate_backward_workspace(held.args)}, a_log_H.options());
  check_launch(
      "_kda_gate_backward",
      cuda::launch_gate_backward(
          held.args, {d_decay_log.const_data_ptr<float>(), d_z.mutable_data_ptr(), d_a_log.mutable_data_ptr<float>(),
                      d_dt_bias.mutable_data_ptr<float>(), workspace.mutable_data_ptr<float>()}));
  return {d_z, d_a_log, d_dt_bias};
}

}  // namespace

}  // namespace furlong::kda

TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("kda_step_", furlong::kda::step_cuda);
  m.impl("kda_step_fused_", furlong::kda::step_fused_cuda);
  m.impl("kda_gate_bounded", furlong::kda::bounded_cuda);
  m.impl("kda_gate_softplus", furlong::kda::softplus_cuda);
  m.impl("_kda_gate_backward", furlong::kda::gate_backward_cuda);
}
