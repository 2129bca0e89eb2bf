// moe.router, moe.block.k3, moe.block.linear48b.

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>

#include "furlong/ops/common/linear.h"
#include "furlong/ops/moe/layer.h"
#include "tests/golden/layer_params.h"

namespace furlong::golden {
namespace {

/// Ids and weights sorted by id, since the order of the chosen experts is no part of the cases.
struct Chosen {
  at::Tensor ids_NA, weights_NA;
};

Chosen sorted_by_id(const at::Tensor& ids_NA, const at::Tensor& weights_NA) {
  const auto [ids, order] = ids_NA.sort(1);
  return {ids, weights_NA.gather(1, order)};
}

void run_router(Case& test) {
  const Json& constants = test.info().at("constants");
  const RouteConfig config{.num_chosen = constants.at("k"),
                           .num_groups = constants.at("num_expert_group"),
                           .groups_kept = constants.at("topk_group"),
                           .renormalize = constants.at("renormalize"),
                           .scale = constants.at("routed_scaling_factor")};
  const at::Tensor x = test.f32("x").detach().clone().requires_grad_(true);
  const at::Tensor gate = test.f32("gate.weight").detach().clone().requires_grad_(true);
  const RouteOutput out =
      moe_route(linear(x, gate, Numerics::kFast), test.f32("gate.e_score_correction_bias"), config, std::nullopt);
  const Chosen got = sorted_by_id(out.ids_NA, out.weights_NA);
  const Chosen expected = sorted_by_id(test.tensor("out.ids"), test.f32("out.weights"));
  test.expect("ids", got.ids_NA.equal(expected.ids_NA));
  test.expect_close("weights", got.weights_NA, expected.weights_NA, test.tolerance("values"));
  test.expect_close("scores", out.scores_NE, test.f32("out.scores"), test.tolerance("values"));
  const at::Tensor dense = at::zeros_like(out.scores_NE).scatter(1, out.ids_NA, out.weights_NA);
  test.expect_close("dense weights", dense, test.f32("out.weights_dense"), test.tolerance("values"));
  (dense * test.f32("d_weights")).sum().backward();
  test.expect_close("d_x", x.grad(), test.f32("out.d_x"), test.tolerance("gradients"));
  test.expect_close("d_gate", gate.grad(), test.f32("out.d_gate.weight"), test.tolerance("gradients"));
}

MoeLayerConfig block_config(const Case& test) {
  const Json& constants = test.info().at("constants");
  const bool k3 = test.kind() == "moe.block.k3";
  MoeLayerConfig config{.hidden_size = constants.at("hidden"),
                        .expert_size = constants.at("moe_intermediate"),
                        .num_experts = constants.at("experts"),
                        .route = {.num_chosen = constants.at("k"), .scale = constants.at("routed_scaling_factor")}};
  config.num_shared_experts = test.tensor("param.shared_experts.gate_proj.weight").size(0) / config.expert_size;
  if (k3) {
    const Json& betas = constants.at("situ beta/linear_beta");
    config.latent_size = constants.at("latent");
    config.latent_norm = true;
    config.activation = {Activation::Kind::kSitu, betas.at(0), betas.at(1).get<double>()};
    config.norm_eps = constants.at("norm_eps");
  }
  return config;
}

void run_block(Case& test) {
  MoeLayer layer(block_config(test));
  ParamList list;
  layer.declare(list, "");
  load_params(test, list);
  for (const Numerics numerics : {Numerics::kFast, Numerics::kExact}) {
    for (const Param& param : list.params()) param.tensor->mutable_grad() = at::Tensor();
    const at::Tensor x = test.f32("x").detach().clone().requires_grad_(true);
    const int64_t tokens = x.size(0) * x.size(1);
    LayerRecord record;
    const at::Tensor y = layer.forward(x.reshape({tokens, -1}), SequenceLayout::from_lengths({tokens}, test.device()),
                                       {.numerics = numerics, .record = &record});
    test.expect_close("y", y.view_as(x), test.f32("out.y"), test.tolerance("values"));
    test.expect("ids", std::get<0>(record.expert_ids_NA.sort(1)).equal(std::get<0>(test.tensor("out.ids").sort(1))));
    (y.view_as(x) * test.f32("dy")).sum().backward();
    test.expect_close("d_x", x.grad(), test.f32("out.d_x"), test.tolerance("gradients"));
    expect_param_gradients(test, list, test.tolerance("gradients"));
  }
}

FURLONG_GOLDEN("moe.router", run_router);
FURLONG_GOLDEN("moe.block.k3", run_block);
FURLONG_GOLDEN("moe.block.linear48b", run_block);

}  // namespace
}  // namespace furlong::golden
