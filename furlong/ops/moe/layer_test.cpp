#include "furlong/ops/moe/layer.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>

#include "furlong/base/error.h"
#include "tests/support/gradient.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

MoeLayerConfig small_config() {
  return {.hidden_size = 24,
          .latent_size = 12,
          .latent_norm = true,
          .expert_size = 8,
          .num_experts = 6,
          .num_shared_experts = 2,
          .route = {.num_chosen = 2},
          .activation = {Activation::Kind::kSitu, 4.0, 25.0}};
}

struct Built {
  MoeLayer layer{small_config()};
  ParamList list;
  Built() {
    layer.declare(list, "");
    for (const Param& param : list.params()) {
      const at::IntArrayRef shape = param.spec.shape;
      *param.tensor = param.spec.init.kind == Init::Kind::kConstant ? at::full(shape, param.spec.init.a).to(at::kFloat)
                                                                    : at::randn(shape) * 0.2;
    }
  }
};

TEST(MoeLayer, RowsPastTheLastSequenceAreZeroAndNeverRead) {
  Built built;
  const at::Tensor x = at::randn({5, 24});
  const auto layout = SequenceLayout::from_lengths({3, 2});
  const at::Tensor padded = at::cat({x, at::full({2, 24}, std::numeric_limits<float>::quiet_NaN())}).requires_grad_();
  const at::Tensor y = built.layer.forward(padded, layout, {});
  EXPECT_TRUE(y.narrow(0, 0, 5).equal(built.layer.forward(x, layout, {})));
  EXPECT_EQ(y.narrow(0, 5, 2).abs().max().item<float>(), 0.0f);
  y.sum().backward();
  EXPECT_EQ(padded.grad().narrow(0, 5, 2).abs().max().item<float>(), 0.0f);
}

TEST(MoeLayer, CountsOnceAndInTrainingForwardsAlone) {
  Built built;
  const at::Tensor x = at::cat({at::randn({5, 24}), at::full({3, 24}, std::numeric_limits<float>::quiet_NaN())});
  const auto layout = SequenceLayout::from_lengths({5});
  built.layer.forward(x, layout, {.training = true});  // not enabled: nothing to count with
  EXPECT_EQ(built.layer.balancer(), nullptr);
  built.layer.enable_balancing(100);
  built.layer.forward(x, layout, {.training = false});  // evaluation, recomputation
  EXPECT_EQ(built.layer.balancer()->num_tokens(), 0);
  built.layer.forward(x, layout, {.training = true});
  built.layer.forward(x, layout, {.training = false});
  EXPECT_EQ(built.layer.balancer()->num_tokens(), 5);
  EXPECT_EQ(built.layer.balancer()->counts_EQ().sum().item<int64_t>(), 5 * 6);
  const at::Tensor before = built.layer.correction_bias_E().clone();
  EXPECT_TRUE(built.layer.balancer()->update(built.layer.correction_bias_E()));
  EXPECT_FALSE(built.layer.correction_bias_E().equal(before));
}

TEST(MoeLayer, RecordsTheRoutingAndReplaysIt) {
  Built built;
  const at::Tensor x = at::randn({9, 24});
  const auto layout = SequenceLayout::from_lengths({9});
  LayerRecord record;
  const at::Tensor y = built.layer.forward(x, layout, {.record = &record});
  EXPECT_EQ(record.load_E.sum().item<int64_t>(), 18);
  EXPECT_EQ(record.margin_N.size(0), 9);
  built.layer.correction_bias_E().copy_(at::randn({6}));
  EXPECT_FALSE(built.layer.forward(x, layout, {}).equal(y));
  EXPECT_TRUE(built.layer.forward(x, layout, {.forced_expert_ids_NA = record.expert_ids_NA}).equal(y));
}

TEST(MoeLayer, RoutesInFloatUnderBfloat16) {
  Built built;
  const at::Tensor x = at::randn({40, 24}).to(at::kBFloat16);
  const auto layout = SequenceLayout::from_lengths({40});
  LayerRecord narrow, wide;
  const at::Tensor y = built.layer.forward(x, layout, {.record = &narrow});
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  const at::Tensor expected = built.layer.forward(x.to(at::kFloat), layout, {.record = &wide});
  EXPECT_TRUE(narrow.expert_ids_NA.equal(wide.expert_ids_NA));
  EXPECT_CLOSE(y, expected, 4 * tolerance::kBf16);  // five products in a row, each rounded to bf16
}

TEST(MoeLayer, HandlesNoTokensAndRefusesBadShapes) {
  Built built;
  EXPECT_EQ(built.layer.forward(at::zeros({0, 24}), SequenceLayout::from_lengths({}), {}).sizes(),
            (std::vector<int64_t>{0, 24}));
  EXPECT_THROW(built.layer.forward(at::zeros({2, 23}), SequenceLayout::from_lengths({2}), {}), UsageError);
  EXPECT_THROW(built.layer.forward(at::zeros({2, 24}), SequenceLayout::from_lengths({3}), {}), UsageError);
}

TEST(MoeLayer, DeclaresRulesOfItsParameters) {
  Built built;
  for (const Param& param : built.list.params()) {
    const ParamSpec& spec = param.spec;
    EXPECT_EQ(spec.muon_blocks, spec.stacked() ? 6 : 1) << spec.name;
    EXPECT_EQ(spec.routed_expert, spec.stacked()) << spec.name;
    if (spec.name == "gate.e_score_correction_bias") {
      EXPECT_EQ(spec.rule, OptimizerRule::kFrozen);
      EXPECT_EQ(spec.dtype, DtypePolicy::kFp32);
    } else if (spec.name == "routed_expert_norm.weight") {
      EXPECT_EQ(spec.rule, OptimizerRule::kAdamW);
      EXPECT_FALSE(spec.weight_decay);
    } else {
      EXPECT_EQ(spec.rule, OptimizerRule::kMuon) << spec.name;
    }
  }
}

}  // namespace
}  // namespace furlong
