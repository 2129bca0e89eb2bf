// mla_layer.k3, mla_layer.linear48b: the whole layer with gradients, and prefill followed by decoding.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include "furlong/ops/mla/layer.h"
#include "tests/golden/layer_params.h"

namespace furlong::golden {
namespace {

MlaLayerConfig layer_config(const Case& test) {
  const Json& constants = test.info().at("constants");
  MlaLayerConfig config{.hidden_size = constants.at("hidden"),
                        .num_heads = constants.at("heads"),
                        .q_lora_rank = constants.value("q_lora_rank", 0),
                        .kv_lora_rank = constants.at("kv_lora_rank"),
                        .qk_nope_head_dim = constants.at("nope"),
                        .qk_rope_head_dim = constants.at("rope"),
                        .v_head_dim = constants.at("v"),
                        .output_gate = test.kind() == "mla_layer.k3",
                        .latent_norm_eps = constants.at("latent_norm_eps")};
  return config;
}

std::vector<int64_t> sequence_lengths(const Case& test) {
  const at::Tensor x = test.tensor("x");
  if (!test.has("cu_seqlens")) return std::vector<int64_t>(x.size(0), x.size(1));
  const at::Tensor lengths = test.tensor("cu_seqlens").diff().cpu();
  return {lengths.const_data_ptr<int64_t>(), lengths.const_data_ptr<int64_t>() + lengths.numel()};
}

/// The whole batch as a prefill of each of `calls` lengths in turn, through the cache.
void run_continuation(Case& test, const MlaLayer& layer, const std::vector<int64_t>& calls, Numerics numerics) {
  const at::NoGradGuard no_grad;
  const at::Tensor x_BTD = test.f32("x");
  const int64_t batch = x_BTD.size(0), hidden = x_BTD.size(2);
  LatentCache cache = layer.allocate_state(batch, at::kFloat, test.device());
  std::vector<int64_t> slots;
  for (int64_t b = 0; b < batch; ++b) slots.push_back(batch - 1 - b);
  std::vector<at::Tensor> parts;
  int64_t done = 0;
  for (const int64_t count : calls) {
    const auto layout = SequenceLayout::with_state(std::vector<int64_t>(batch, count), slots,
                                                   std::vector<int64_t>(batch, done), test.device());
    const at::Tensor x_ND = x_BTD.narrow(1, done, count).reshape({-1, hidden});
    parts.push_back(layer.forward(x_ND, layout, &cache, {.numerics = numerics}).view({batch, count, hidden}));
    done += count;
  }
  const std::string how = std::to_string(calls.size()) + " calls, " + (numerics == Numerics::kExact ? "exact" : "fast");
  test.expect_close("y, " + how, at::cat(parts, 1), test.f32("out.y"), test.tolerance("values"));
  const at::Tensor cached = cache.pool_SCE.flip(0).narrow(1, 0, done);
  test.expect_close("cache, " + how, cached, at::cat({test.f32("out.cache_latent"), test.f32("out.cache_k_shared")}, 2),
                    test.tolerance("values"));
}

void run_mla_layer(Case& test) {
  MlaLayer layer(layer_config(test));
  ParamList list;
  layer.declare(list, "");
  load_params(test, list);
  const std::vector<int64_t> lengths = sequence_lengths(test);
  const auto layout = SequenceLayout::from_lengths(lengths, test.device());
  for (const Numerics numerics : {Numerics::kFast, Numerics::kExact}) {
    for (const Param& param : list.params()) param.tensor->mutable_grad() = at::Tensor();
    const at::Tensor x_BTD = test.f32("x").detach().clone().requires_grad_(true);
    const at::Tensor y = layer.forward(x_BTD.reshape({-1, x_BTD.size(2)}), layout, nullptr, {.numerics = numerics});
    test.expect_close("y", y.view_as(x_BTD), test.f32("out.y"), test.tolerance("values"));
    (y.view_as(x_BTD) * test.f32("dy")).sum().backward();
    test.expect_close("d_x", x_BTD.grad(), test.f32("out.d_x"), test.tolerance("gradients"));
    expect_param_gradients(test, list, test.tolerance("gradients"));
  }
  if (test.has("cu_seqlens")) return;
  for (const Numerics numerics : {Numerics::kFast, Numerics::kExact}) {
    run_continuation(test, layer, {lengths[0]}, numerics);
    run_continuation(test, layer, {5, lengths[0] - 5}, numerics);
    run_continuation(test, layer, std::vector<int64_t>(lengths[0], 1), numerics);
  }
}

FURLONG_GOLDEN("mla_layer.k3", run_mla_layer);
FURLONG_GOLDEN("mla_layer.linear48b", run_mla_layer);

}  // namespace
}  // namespace furlong::golden
