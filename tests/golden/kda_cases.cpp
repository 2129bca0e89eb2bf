// KDA operator and layer against flash-linear-attention, transformers and NeMo Automodel.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include "furlong/ops/kda/kda.h"
#include "furlong/ops/kda/layer.h"
#include "tests/support/golden.h"

namespace furlong::golden {

namespace {

/// [B, T, ...] -> [B T, ...].
at::Tensor packed(const at::Tensor& x) {
  return x.flatten(0, 1);
}

std::vector<int64_t> lengths_of(const Case& c, int64_t batch, int64_t tokens) {
  if (!c.has("cu_seqlens")) return std::vector<int64_t>(batch, tokens);
  const at::Tensor offsets = c.tensor("cu_seqlens").cpu();
  const auto* starts = offsets.const_data_ptr<int64_t>();
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b + 1 < offsets.numel(); ++b) lengths.push_back(starts[b + 1] - starts[b]);
  return lengths;
}

/// All in fp32, whatever the case stores: the expected values are exact for the stored inputs.
struct OpInputs {
  at::Tensor q, k, v, z, decay_log, beta, state, a_log, dt_bias;

  explicit OpInputs(const Case& c) {
    const auto leaf = [&](const char* name) { return packed(c.f32(name)).clone().requires_grad_(); };
    q = leaf("q"), k = leaf("k"), v = leaf("v"), beta = leaf("beta"), decay_log = leaf("g");
    if (c.has("initial_state")) state = c.f32("initial_state").clone().requires_grad_();
    if (!c.has("z")) return;
    z = leaf("z");
    a_log = c.f32("A_log").clone().requires_grad_();
    dt_bias = c.f32("dt_bias").reshape({q.size(1), q.size(2)}).clone().requires_grad_();
  }

  std::optional<at::Tensor> initial_state() const { return state.defined() ? std::optional(state) : std::nullopt; }

  at::Tensor gate(const Case& c) const {
    const std::string formula = c.info().value("gate", "");
    return formula.find("lower_bound *") != std::string::npos ? kda_gate_bounded(z, a_log, dt_bias, -5.0)
                                                              : kda_gate_softplus(z, a_log, dt_bias);
  }
};

void check_op_gradients(Case& c, const std::string& form, const OpInputs& in, double tolerance) {
  const auto check = [&](const char* name, const at::Tensor& leaf) {
    const std::string key = std::string("out.d_") + name;
    if (leaf.defined() && c.has(key)) {
      c.expect_close(form + " d_" + name, leaf.grad().reshape_as(c.tensor(key)), c.f32(key), tolerance);
    }
  };
  check("q", in.q), check("k", in.k), check("v", in.v), check("beta", in.beta), check("initial_state", in.state);
  check("g", in.decay_log), check("z", in.z), check("A_log", in.a_log), check("dt_bias", in.dt_bias);
}

using Form = KdaOutput (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const SequenceLayout&, const std::optional<at::Tensor>&, double);

void run_form(Case& c, const std::string& name, Form form, double values, double gradients) {
  OpInputs in(c);
  const at::Tensor& q_BTHK = c.tensor("q");
  const auto layout = SequenceLayout::from_lengths(lengths_of(c, q_BTHK.size(0), q_BTHK.size(1)), c.device());
  const double scale = 1.0 / std::sqrt(static_cast<double>(q_BTHK.size(3)));
  const auto loss = [&](const at::Tensor& decay_log) {
    const KdaOutput got = form(in.q, in.k, in.v, decay_log, in.beta, layout, in.initial_state(), scale);
    c.expect_close(name + " o", got.out_NHV.view_as(c.tensor("out.o")), c.f32("out.o"), values);
    c.expect_close(name + " final_state", got.final_state_BHKV, c.f32("out.final_state"), values);
    const at::Tensor from_out = (packed(c.f32("do")) * got.out_NHV).sum();
    return c.has("d_final_state") ? from_out + (c.f32("d_final_state") * got.final_state_BHKV).sum() : from_out;
  };
  if (in.z.defined()) {
    const at::Tensor gate = in.gate(c);
    c.expect_close(name + " g", gate.view_as(c.tensor("g")), c.f32("g"), values);
    loss(gate).backward();
    for (at::Tensor leaf : {in.q, in.k, in.v, in.beta, in.state}) {
      if (leaf.defined()) leaf.mutable_grad() = at::Tensor();
    }
  }
  loss(in.decay_log).backward();
  check_op_gradients(c, name, in, gradients);
}

void run_step(Case& c) {
  const OpInputs in(c);
  const at::NoGradGuard no_grad;
  const auto layout =
      SequenceLayout::from_lengths(lengths_of(c, c.tensor("q").size(0), c.tensor("q").size(1)), c.device());
  const double scale = 1.0 / std::sqrt(static_cast<double>(in.q.size(2)));
  at::Tensor state = in.state.defined() ? in.state.detach().clone() : at::zeros_like(c.f32("out.final_state"));
  at::Tensor out = at::empty_like(in.v);
  for (int64_t b = 0; b < layout.num_sequences(); ++b) {
    const at::Tensor slot = at::empty({1}, state.options().dtype(at::kLong)).fill_(b);
    for (int64_t n = layout.start(b); n < layout.start(b) + layout.length(b); ++n) {
      const auto row = [n](const at::Tensor& x) { return x.slice(0, n, n + 1); };
      out.slice(0, n, n + 1) =
          kda_step_(row(in.q), row(in.k), row(in.v), row(in.decay_log), row(in.beta), state, slot, scale);
    }
  }
  const double tolerance = c.tolerance("recurrent_values");
  c.expect_close("step o", out.view_as(c.tensor("out.o")), c.f32("out.o"), tolerance);
  c.expect_close("step final_state", state, c.f32("out.final_state"), tolerance);
}

void run_kda_op(Case& c) {
  run_form(c, "chunk", kda_chunk, c.tolerance("values"), c.tolerance("gradients"));
  run_form(c, "reference", kda_reference, c.tolerance("recurrent_values"), c.tolerance("recurrent_gradients"));
  run_step(c);
}

/// A layer with the case's parameters, upcast to fp32.
struct LayerCase {
  KdaLayer layer;
  ParamList params;

  static KdaLayerConfig config_of(const Case& c, bool k3) {
    const Json& constants = c.info().at("constants");
    KdaLayerConfig config;
    config.hidden_size = constants.at("hidden");
    config.num_heads = constants.at("heads");
    config.head_size = constants.at("head_dim");
    config.conv_kernel = constants.at("conv_kernel");
    config.full_rank_gate = k3;
    if (k3) config.gate_lower_bound = constants.at("gate_lower_bound").get<double>();
    return config;
  }

  LayerCase(const Case& c, bool k3) : layer(config_of(c, k3)) {
    layer.declare(params, "");
    for (const Param& param : params.params()) {
      *param.tensor = c.f32("param." + param.spec.name).reshape(param.spec.shape).clone().requires_grad_();
    }
  }
};

void check_layer_gradients(Case& c, LayerCase& built) {
  const at::Tensor& x_BTD = c.tensor("x");
  const auto layout = SequenceLayout::from_lengths(lengths_of(c, x_BTD.size(0), x_BTD.size(1)), c.device());
  const at::Tensor x = packed(c.f32("x")).detach().clone().requires_grad_();
  const at::Tensor y = built.layer.forward(x, layout, nullptr, {});
  c.expect_close("y", y.view_as(x_BTD), c.f32("out.y"), c.tolerance("values"));
  (y * packed(c.f32("dy"))).sum().backward();
  c.expect_close("d_x", x.grad().view_as(x_BTD), c.f32("out.d_x"), c.tolerance("gradients"));
  for (const Param& param : built.params.params()) {
    const at::Tensor& expected = c.tensor("out.d_param." + param.spec.name);
    c.expect_close("d_" + param.spec.name, param.tensor->grad().reshape_as(expected), expected,
                   c.tolerance("gradients"));
  }
}

void check_states(Case& c, const KdaLayerState& state, int64_t position) {
  const std::string after = ".after_" + std::to_string(position);
  if (!c.has("out.recurrent_state" + after)) return;
  c.expect_close("recurrent state" + after, state.recurrent.pool_SHKV, c.f32("out.recurrent_state" + after),
                 c.tolerance("values"));
  const at::Tensor tails = at::cat(
      {c.f32("out.conv_state_q" + after), c.f32("out.conv_state_k" + after), c.f32("out.conv_state_v" + after)}, 1);
  c.expect_close("conv state" + after, state.conv.pool_STP.transpose(1, 2), tails, c.tolerance("values"));
}

/// The whole sequence again in calls that carry the state.
void check_continuation(Case& c, LayerCase& built, const std::vector<int64_t>& calls) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = c.f32("x");
  const int64_t batch = x.size(0);
  KdaLayerState state = built.layer.allocate_state(batch, at::kFloat, c.device());
  std::vector<int64_t> slots(batch);
  for (int64_t b = 0; b < batch; ++b) slots[b] = b;
  std::vector<at::Tensor> rows;
  int64_t position = 0;
  for (const int64_t tokens : calls) {
    const auto layout = SequenceLayout::with_state(std::vector<int64_t>(batch, tokens), slots,
                                                   std::vector<int64_t>(batch, position), c.device());
    const at::Tensor y = built.layer.forward(packed(x.slice(1, position, position + tokens)), layout, &state, {});
    rows.push_back(y.view({batch, tokens, -1}));
    position += tokens;
    check_states(c, state, position);
  }
  c.expect_close("y in calls", at::cat(rows, 1), c.f32("out.y"), c.tolerance("values"));
}

/// Call lengths that stop at every position for which the case holds states; after the last one, single tokens.
std::vector<int64_t> calls_of(const Json& continuation, int64_t tokens) {
  if (continuation.contains("calls (tokens each)")) return continuation.at("calls (tokens each)");
  std::vector<int64_t> calls;
  int64_t position = 0;
  for (const int64_t stop : continuation.at("states after").get<std::vector<int64_t>>()) {
    calls.push_back(stop - position);
    position = stop;
  }
  for (; position < tokens; ++position) calls.push_back(1);
  return calls;
}

void run_layer(Case& c, bool k3) {
  LayerCase built(c, k3);
  check_layer_gradients(c, built);
  if (c.has("cu_seqlens")) return;
  const int64_t tokens = c.tensor("x").size(1);
  check_continuation(c, built, calls_of(c.info().at("continuation"), tokens));
  check_continuation(c, built, std::vector<int64_t>(tokens, 1));
}

void run_k3(Case& c) {
  run_layer(c, true);
}
void run_linear48b(Case& c) {
  run_layer(c, false);
}

}  // namespace

FURLONG_GOLDEN("kda_op", run_kda_op);
FURLONG_GOLDEN("kda_layer.k3", run_k3);
FURLONG_GOLDEN("kda_layer.linear48b", run_linear48b);

}  // namespace furlong::golden
