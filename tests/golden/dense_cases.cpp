// Norms, the short convolution and gated activations.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/maximum.h>

#include <functional>
#include <string>
#include <vector>

#include "furlong/ops/norm/norm.h"
#include "furlong/ops/short_conv/short_conv.h"
#include "furlong/ops/situ/situ.h"
#include "tests/support/golden.h"

namespace furlong::golden {
namespace {

at::Tensor leaf(const Case& golden, const std::string& name) {
  return golden.f32(name).clone().requires_grad_(true);
}

/// Elementwise equal up to one unit in the last place of bf16, which is at most 2^-7 of the value.
void expect_one_ulp(Case& golden, const std::string& what, const at::Tensor& got, const at::Tensor& expected) {
  const at::Tensor wide = got.to(at::kFloat);
  const at::Tensor wide_expected = expected.to(at::kFloat);
  const at::Tensor ulp = at::maximum(wide.abs(), wide_expected.abs()) * 0x1p-7;
  golden.expect(what, ((wide - wide_expected).abs() <= ulp).all().item<bool>(), "up to one unit in the last place");
}

/// One norm: inputs `NAME.<arguments>`, the same in bf16 where the case gives that run (fp32 weights stay fp32 there).
void run_norm(Case& golden, const std::string& name, const std::vector<std::string>& arguments, bool bf16_weight,
              const std::function<at::Tensor(const std::vector<at::Tensor>&)>& op) {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> narrow;
  for (const std::string& argument : arguments) {
    inputs.push_back(leaf(golden, name + "." + argument));
    const bool keep = argument == "weight" && !bf16_weight;
    narrow.push_back(inputs.back().detach().to(keep ? at::kFloat : at::kBFloat16));
  }
  const at::Tensor y = op(inputs);
  (y * golden.f32(name + ".dy")).sum().backward();
  golden.expect_close(name + ".out.y", y, golden.f32(name + ".out.y"), golden.tolerance("values"));
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::string gradient = name + ".out.d_" + arguments[i];
    golden.expect_close(gradient, inputs[i].grad(), golden.f32(gradient), golden.tolerance("gradients"));
  }
  if (golden.has(name + ".out.y_bf16")) {
    expect_one_ulp(golden, name + ".out.y_bf16", op(narrow), golden.tensor(name + ".out.y_bf16"));
  }
}

/// The case holds [batch, channels, time]; the op wants tokens of all sequences end to end.
at::Tensor packed(const at::Tensor& x_BPT) {
  return x_BPT.transpose(1, 2).reshape({-1, x_BPT.size(1)});
}

void run_convolution(Case& golden) {
  const at::Tensor x_BPT = leaf(golden, "conv_silu.x");
  const at::Tensor weight_PW = leaf(golden, "conv_silu.weight");
  const int64_t batch = x_BPT.size(0);
  const int64_t time = x_BPT.size(2);
  const auto run = [&](int64_t steps) {
    const auto layout = SequenceLayout::from_lengths(std::vector<int64_t>(batch, steps), golden.device());
    return short_conv(packed(x_BPT.slice(2, 0, steps)), weight_PW, layout, std::nullopt);
  };
  const at::Tensor y_NP = std::get<0>(run(time));
  (y_NP * packed(golden.f32("conv_silu.dy"))).sum().backward();
  golden.expect_close("conv_silu.out.y", y_NP, packed(golden.f32("conv_silu.out.y")), golden.tolerance("values"));
  golden.expect_close("conv_silu.out.d_x", x_BPT.grad(), golden.f32("conv_silu.out.d_x"),
                      golden.tolerance("gradients"));
  golden.expect_close("conv_silu.out.d_weight", weight_PW.grad(), golden.f32("conv_silu.out.d_weight"),
                      golden.tolerance("gradients"));
  for (const int64_t steps : {int64_t{1}, int64_t{2}, time}) {
    const std::string name = "conv_silu.out.state_after_" + std::to_string(steps);
    const at::Tensor tail_BPT = std::get<1>(run(steps)).transpose(1, 2);
    golden.expect_close(name, tail_BPT, golden.f32(name), golden.tolerance("values"));
  }
}

void run_primitives(Case& golden) {
  const double eps = golden.info().at("constants").at("rmsnorm eps").get<double>();
  for (const std::string suffix : {"", "_small"}) {
    run_norm(golden, "rmsnorm" + suffix, {"x", "weight"}, true,
             [eps](const std::vector<at::Tensor>& t) { return rms_norm(t[0], t[1], eps); });
    run_norm(golden, "gated_rmsnorm" + suffix, {"x", "weight", "gate"}, false,
             [eps](const std::vector<at::Tensor>& t) { return gated_rms_norm(t[0], t[1], t[2], eps); });
  }
  for (const std::string suffix : {"", "_small", "_with_zero_row"}) {
    run_norm(golden, "l2norm" + suffix, {"x"}, true,
             [](const std::vector<at::Tensor>& t) { return l2_norm(t[0], 1e-6); });
  }
  run_convolution(golden);
}

void run_situ(Case& golden) {
  const Json& constants = golden.info().at("constants");
  const double beta = constants.at("beta").get<double>();
  std::optional<double> linear_beta;
  if (!constants.at("linear_beta").is_null()) linear_beta = constants.at("linear_beta").get<double>();
  const at::Tensor gate = leaf(golden, "gate");
  const at::Tensor up = leaf(golden, "up");
  const at::Tensor y = situ_glu(gate, up, beta, linear_beta);
  (y * golden.f32("dy")).sum().backward();
  golden.expect_close("out.y", y, golden.f32("out.y"), golden.tolerance("values"));
  golden.expect_close("out.d_gate", gate.grad(), golden.f32("out.d_gate"), golden.tolerance("gradients"));
  golden.expect_close("out.d_up", up.grad(), golden.f32("out.d_up"), golden.tolerance("gradients"));
  const at::Tensor narrow = situ_glu(gate.detach().to(at::kBFloat16), up.detach().to(at::kBFloat16), beta, linear_beta);
  expect_one_ulp(golden, "out.y_bf16_inputs", narrow, golden.tensor("out.y_bf16_inputs"));
}

}  // namespace

FURLONG_GOLDEN("primitives", run_primitives);
FURLONG_GOLDEN("situ", run_situ);

}  // namespace furlong::golden
