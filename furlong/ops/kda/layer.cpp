#include "furlong/ops/kda/layer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sigmoid.h>

#include <cmath>

#include "furlong/base/shape.h"
#include "furlong/ops/common/linear.h"
#include "furlong/ops/kda/kda.h"
#include "furlong/ops/norm/norm.h"
#include "furlong/ops/short_conv/short_conv.h"

namespace furlong {

namespace {

// Bounded gate: at dt_bias = 0 every channel would forget half its content within a token, and long memory would have
// to be learned from nothing. Drawn from [-7, -0.5], |decay_log| starts log-uniform between 0.005 and 1.9: memories of
// half a token to 200 tokens.
constexpr double kBoundedBiasLow = -7.0;
constexpr double kBoundedBiasHigh = -0.5;
// Softplus gate: exp(a_log) in [1, 16] and softplus(dt_bias) log-uniform in [1e-3, 1e-1], so that decays per token
// start between 0.999 and 0.2 (flash-linear-attention's initialisation). Below 0.1 the inverse softplus is a logarithm
// to within 5 %, hence uniform between the ends' inverses.
constexpr double kSoftplusBiasLow = -6.9073;   // log(expm1(1e-3))
constexpr double kSoftplusBiasHigh = -2.2522;  // log(expm1(1e-1))

/// A sequence without past starts from zero, whatever its slot held before.
void clear_fresh_slots(KdaLayerState& state, const SequenceLayout& layout) {
  std::vector<int64_t> fresh;
  for (int64_t b = 0; b < layout.num_sequences(); ++b) {
    if (layout.past(b) == 0) fresh.push_back(layout.slot(b));
  }
  if (fresh.empty()) return;
  const at::Tensor slots = at::from_blob(fresh.data(), {static_cast<int64_t>(fresh.size())}, at::kLong)
                               .to(layout.slots().device(), at::kLong, false, true);
  state.recurrent.pool_SHKV.index_fill_(0, slots, 0);
  state.conv.pool_STP.index_fill_(0, slots, 0);
}

void record_gates(LayerRecord& record, const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH,
                  const std::optional<double>& lower_bound) {
  const at::Tensor decay_log = decay_log_NHK.detach();
  record.decay_saturated = decay_log.le(lower_bound.has_value() ? 0.99 * *lower_bound : -5.0).to(at::kFloat).mean();
  record.decay_open = decay_log.gt(-0.01).to(at::kFloat).mean();
  record.beta_mean = beta_NH.detach().mean();
}

}  // namespace

void KdaLayer::declare(ParamList& list, const std::string& prefix) {
  const int64_t D = config_.hidden_size, H = config_.num_heads, K = config_.head_size, P = H * K;
  const auto matrix = [&](const char* name, int64_t out, int64_t in, int64_t blocks, at::Tensor* tensor) {
    ParamSpec spec{name, {out, in}};
    spec.rule = OptimizerRule::kMuon;
    spec.muon_blocks = blocks;
    spec.init = Init::normal(config_.init_std);
    list.add(prefix, std::move(spec), tensor);
  };
  const auto fp32 = [&](const char* name, std::vector<int64_t> shape, Init init, at::Tensor* tensor) {
    ParamSpec spec{name, std::move(shape)};
    spec.dtype = DtypePolicy::kFp32;
    spec.weight_decay = false;
    spec.init = init;
    if (tensor == &q_conv_ || tensor == &k_conv_ || tensor == &v_conv_) {
      spec.published_shape = {P, 1, config_.conv_kernel};
    }
    list.add(prefix, std::move(spec), tensor);
  };
  const double conv_range = 1.0 / std::sqrt(static_cast<double>(config_.conv_kernel));
  const Init conv = Init::uniform(-conv_range, conv_range);
  const bool bounded = config_.gate_lower_bound.has_value();

  matrix("q_proj.weight", P, D, H, &q_proj_);
  matrix("k_proj.weight", P, D, H, &k_proj_);
  matrix("v_proj.weight", P, D, H, &v_proj_);
  fp32("q_conv1d.weight", {P, config_.conv_kernel}, conv, &q_conv_);
  fp32("k_conv1d.weight", {P, config_.conv_kernel}, conv, &k_conv_);
  fp32("v_conv1d.weight", {P, config_.conv_kernel}, conv, &v_conv_);
  matrix("f_a_proj.weight", K, D, 1, &f_a_proj_);
  matrix("f_b_proj.weight", P, K, H, &f_b_proj_);
  ParamSpec beta{"b_proj.weight", {H, D}};
  beta.init = Init::normal(config_.init_std);
  list.add(prefix, std::move(beta), &b_proj_);
  fp32("A_log", {H}, bounded ? Init::constant(0) : Init::log_of_uniform(1, 16), &a_log_);
  fp32("dt_bias", {P},
       bounded ? Init::uniform(kBoundedBiasLow, kBoundedBiasHigh) : Init::uniform(kSoftplusBiasLow, kSoftplusBiasHigh),
       &dt_bias_);
  if (config_.full_rank_gate) {
    matrix("g_proj.weight", P, D, H, &g_proj_);
  } else {
    matrix("g_a_proj.weight", K, D, 1, &g_a_proj_);
    matrix("g_b_proj.weight", P, K, H, &g_b_proj_);
  }
  fp32("o_norm.weight", {K}, Init::constant(1), &o_norm_);
  matrix("o_proj.weight", D, P, 1, &o_proj_);
}

KdaLayerState KdaLayer::allocate_state(int64_t slots, at::ScalarType compute_dtype, at::Device device) const {
  const int64_t H = config_.num_heads, K = config_.head_size;
  return {KdaState::allocate(slots, H, K, K, device),
          ConvState::allocate(slots, config_.conv_kernel, 3 * H * K, compute_dtype, device)};
}

at::Tensor KdaLayer::convolve(const at::Tensor& x_NP, const at::Tensor& weight_PW, int64_t part,
                              const SequenceLayout& layout, KdaLayerState* state, bool step) const {
  if (state == nullptr) return std::get<0>(short_conv(x_NP, weight_PW, layout, std::nullopt));
  const int64_t P = x_NP.size(1);
  at::Tensor pool = state->conv.pool_STP.narrow(2, part * P, P);
  if (step) return short_conv_step_(x_NP, weight_PW, pool, layout.slots());
  auto [y, tail] = short_conv(x_NP, weight_PW, layout, pool.index_select(0, layout.slots()));
  pool.index_copy_(0, layout.slots(), tail);
  return y;
}

at::Tensor KdaLayer::recur(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                           const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH, const SequenceLayout& layout,
                           KdaLayerState* state, bool step) const {
  const double scale = 1.0 / std::sqrt(static_cast<double>(config_.head_size));
  if (state == nullptr) return kda_chunk(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, layout, {}, scale).out_NHV;
  at::Tensor& pool = state->recurrent.pool_SHKV;
  if (step) return kda_step_(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, pool, layout.slots(), scale);
  const KdaOutput result =
      kda_chunk(q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, layout, pool.index_select(0, layout.slots()), scale);
  pool.index_copy_(0, layout.slots(), result.final_state_BHKV);
  return result.out_NHV;
}

at::Tensor KdaLayer::forward(const at::Tensor& x_ND, const SequenceLayout& layout, KdaLayerState* state,
                             const ForwardContext& context) const {
  check_shape("KdaLayer", "x_ND", x_ND, {-1, config_.hidden_size});
  const int64_t N = layout.num_tokens(), H = config_.num_heads, K = config_.head_size;
  check_argument(x_ND.size(0) >= N, "KdaLayer", "x_ND: got fewer rows than the layout has tokens");
  if (x_ND.size(0) > N) {
    return at::constant_pad_nd(forward(x_ND.slice(0, 0, N), layout, state, context), {0, 0, 0, x_ND.size(0) - N});
  }
  check_argument(state == nullptr || (layout.has_state() && !at::GradMode::is_enabled()), "KdaLayer",
                 "state: needs a layout with slots and no autograd");
  if (state != nullptr) clear_fresh_slots(*state, layout);
  const bool step = state != nullptr && layout.is_decode() && context.numerics == Numerics::kFast;

  const auto project = [&](const at::Tensor& x, const at::Tensor& weight) {
    return linear(x, weight, context.numerics);
  };
  const auto mixed = [&](const at::Tensor& projection, const at::Tensor& conv, int64_t part) {
    return convolve(project(x_ND, projection), conv, part, layout, state, step).view({N, H, K});
  };
  const at::Tensor q = l2_norm(mixed(q_proj_, q_conv_, 0));
  const at::Tensor k = l2_norm(mixed(k_proj_, k_conv_, 1));
  const at::Tensor v = mixed(v_proj_, v_conv_, 2);
  const at::Tensor z = project(project(x_ND, f_a_proj_), f_b_proj_).view({N, H, K});
  const at::Tensor dt_bias = dt_bias_.view({H, K});
  const at::Tensor decay_log = config_.gate_lower_bound.has_value()
                                   ? kda_gate_bounded(z, a_log_, dt_bias, *config_.gate_lower_bound)
                                   : kda_gate_softplus(z, a_log_, dt_bias);
  const at::Tensor beta = at::sigmoid(project(x_ND, b_proj_).to(a_log_.scalar_type()));
  if (context.record != nullptr) record_gates(*context.record, decay_log, beta, config_.gate_lower_bound);

  const at::Tensor out = recur(q, k, v, decay_log, beta, layout, state, step);
  const at::Tensor gate =
      config_.full_rank_gate ? project(x_ND, g_proj_) : project(project(x_ND, g_a_proj_), g_b_proj_);
  const at::Tensor normed = gated_rms_norm(out, o_norm_, gate.view({N, H, K}), config_.norm_eps);
  return project(normed.reshape({N, H * K}), o_proj_);
}

}  // namespace furlong
