#include "furlong/ops/mla/layer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>

#include "furlong/base/error.h"
#include "furlong/ops/mla/layer_blocked.h"
#include "furlong/ops/mla/mla.h"
#include "tests/support/gradient.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

struct Built {
  MlaLayer layer;
  ParamList list;
  Built(const MlaLayerConfig& config, at::ScalarType dtype = at::kFloat) : layer(config) {
    layer.declare(list, "");
    for (const Param& param : list.params()) {
      const at::IntArrayRef shape = param.spec.shape;
      *param.tensor =
          (param.spec.init.kind == Init::Kind::kConstant ? at::ones(shape) : at::randn(shape) * 0.2).to(dtype);
    }
  }
};

MlaLayerConfig small_config() {
  return {.hidden_size = 24,
          .num_heads = 3,
          .q_lora_rank = 12,
          .kv_lora_rank = 16,
          .qk_nope_head_dim = 8,
          .qk_rope_head_dim = 4,
          .v_head_dim = 8,
          .output_gate = true};
}

/// x through the cache in calls of the given sizes.
at::Tensor in_calls(const MlaLayer& layer, const at::Tensor& x_TD, const std::vector<int64_t>& calls,
                    Numerics numerics) {
  const at::NoGradGuard no_grad;
  LatentCache cache = layer.allocate_state(2, x_TD.scalar_type(), at::kCPU);
  std::vector<at::Tensor> parts;
  int64_t done = 0;
  for (const int64_t count : calls) {
    parts.push_back(layer.forward(x_TD.narrow(0, done, count), SequenceLayout::with_state({count}, {1}, {done}), &cache,
                                  {.numerics = numerics}));
    done += count;
  }
  return at::cat(parts);
}

TEST(MlaLayer, SplitEqualsWholeToRoundingInFastMode) {
  const Built built(small_config());
  const at::Tensor x = at::randn({300, 24});
  const at::Tensor whole = built.layer.forward(x, SequenceLayout::from_lengths({300}), nullptr, {});
  // Up to 16 tokens go absorbed here, more on a past blocked, more without one expanded.
  for (const std::vector<int64_t>& calls :
       {std::vector<int64_t>{300}, {150, 150}, {1, 1, 1, 297}, {100, 3, 60, 1, 136}}) {
    EXPECT_CLOSE(in_calls(built.layer, x, calls, Numerics::kFast), whole, tolerance::kFp32Chain);
  }
}

TEST(MlaLayer, SplitPackedAndDecodedRunsAgreeToTheBitInExactMode) {
  const Built built(small_config());
  const at::Tensor x = at::randn({300, 24}), other = at::randn({37, 24});
  const ForwardContext exact{.numerics = Numerics::kExact};
  const at::Tensor whole = built.layer.forward(x, SequenceLayout::from_lengths({300}), nullptr, exact);
  EXPECT_CLOSE(whole, built.layer.forward(x, SequenceLayout::from_lengths({300}), nullptr, {}), tolerance::kFp32Chain);
  for (const std::vector<int64_t>& calls : {std::vector<int64_t>{300}, {65, 191, 1, 43}, {299, 1}}) {
    EXPECT_TRUE(in_calls(built.layer, x, calls, Numerics::kExact).equal(whole));
  }
  const at::Tensor packed =
      built.layer.forward(at::cat({other, x}), SequenceLayout::from_lengths({37, 300}), nullptr, exact);
  EXPECT_TRUE(packed.narrow(0, 37, 300).equal(whole));
}

TEST(MlaLayer, MixedBatchEqualsSingleSequences) {
  const Built built(small_config());
  const at::NoGradGuard no_grad;
  const at::Tensor a = at::randn({90, 24}), b = at::randn({41, 24}), c = at::randn({1, 24});
  LatentCache cache = built.layer.allocate_state(3, at::kFloat, at::kCPU);
  built.layer.forward(at::cat({a.narrow(0, 0, 50), b.narrow(0, 0, 40)}),
                      SequenceLayout::with_state({50, 40}, {2, 0}, {0, 0}), &cache, {});
  const at::Tensor y = built.layer.forward(at::cat({a.narrow(0, 50, 40), b.narrow(0, 40, 1), c}),
                                           SequenceLayout::with_state({40, 1, 1}, {2, 0, 1}, {50, 40, 0}), &cache, {});
  const auto alone = [&](const at::Tensor& x) {
    return built.layer.forward(x, SequenceLayout::from_lengths({x.size(0)}), nullptr, {});
  };
  EXPECT_CLOSE(y, at::cat({alone(a).narrow(0, 50, 40), alone(b).narrow(0, 40, 1), alone(c)}), tolerance::kFp32Chain);
}

TEST(MlaLayer, RowsPastTheLastSequenceAreZeroAndNeverRead) {
  const Built built(small_config());
  const at::Tensor x = at::randn({5, 24});
  const auto layout = SequenceLayout::from_lengths({5});
  const at::Tensor padded = at::cat({x, at::full({2, 24}, std::numeric_limits<float>::quiet_NaN())}).requires_grad_();
  const at::Tensor y = built.layer.forward(padded, layout, nullptr, {});
  EXPECT_TRUE(y.narrow(0, 0, 5).equal(built.layer.forward(x, layout, nullptr, {})));
  EXPECT_EQ(y.narrow(0, 5, 2).abs().max().item<float>(), 0.0f);
  y.sum().backward();
  EXPECT_EQ(padded.grad().narrow(0, 5, 2).abs().max().item<float>(), 0.0f);
}

TEST(MlaLayer, KeepsBfloat16CloseToFloat) {
  const Built wide(small_config());
  Built narrow(small_config());
  for (size_t i = 0; i < wide.list.params().size(); ++i) {
    *narrow.list.params()[i].tensor = wide.list.params()[i].tensor->to(at::kBFloat16);
    *wide.list.params()[i].tensor = narrow.list.params()[i].tensor->to(at::kFloat);
  }
  const at::Tensor x = at::randn({30, 24}).to(at::kBFloat16);
  const auto layout = SequenceLayout::from_lengths({30});
  const at::Tensor expected = wide.layer.forward(x.to(at::kFloat), layout, nullptr, {});
  // Six products in a row, each rounded to bf16.
  EXPECT_CLOSE(narrow.layer.forward(x, layout, nullptr, {}), expected, 4 * tolerance::kBf16);
  EXPECT_CLOSE(in_calls(narrow.layer, x, {20, 1, 9}, Numerics::kFast), expected, 4 * tolerance::kBf16);
}

TEST(MlaLayer, RefusesToWriteTheCacheUnderAutograd) {
  const Built built(small_config());
  LatentCache cache = built.layer.allocate_state(1, at::kFloat, at::kCPU);
  const at::Tensor x = at::randn({2, 24}).requires_grad_();
  EXPECT_THROW(built.layer.forward(x, SequenceLayout::with_state({2}, {0}, {0}), &cache, {}), UsageError);
}

TEST(MlaLayer, DeclaresHeadBlocksAndNorms) {
  const Built built(small_config());
  for (const Param& param : built.list.params()) {
    const ParamSpec& spec = param.spec;
    const bool per_head =
        spec.name == "q_b_proj.weight" || spec.name == "kv_b_proj.weight" || spec.name == "g_proj.weight";
    const bool norm = spec.name.find("layernorm") != std::string::npos;
    EXPECT_EQ(spec.muon_blocks, per_head ? 3 : 1) << spec.name;
    EXPECT_EQ(spec.rule, norm ? OptimizerRule::kAdamW : OptimizerRule::kMuon) << spec.name;
    EXPECT_EQ(spec.weight_decay, !norm) << spec.name;
  }
}

TEST(MlaBlocked, GradientMatchesExpandedForm) {
  const MlaWidths widths{.num_heads = 2, .latent = 6, .nope = 4, .shared_key = 3, .value = 5};
  const auto layout = SequenceLayout::from_lengths({9});
  const testing::Tensors in = {at::randn({9, 2, 7}, at::kDouble), at::randn({9, 9}, at::kDouble),
                               at::randn({18, 6}, at::kDouble)};
  const at::Tensor cotangent = at::randn({9, 2, 5}, at::kDouble);
  const auto expanded = [&](const testing::Tensors& t) {
    const at::Tensor kv = t[1].narrow(1, 0, 6).matmul(t[2].t()).view({9, 2, 9});
    const at::Tensor k = at::cat({kv.narrow(2, 0, 4), t[1].narrow(1, 6, 3).unsqueeze(1).expand({9, 2, 3})}, 2);
    return mla_attention(t[0], k, kv.narrow(2, 4, 5), layout, 0.4);
  };
  for (const Numerics numerics : {Numerics::kFast, Numerics::kExact}) {
    const auto blocked = [&](const testing::Tensors& t) {
      return mla_blocked_attention(t[0], t[1], t[2], 0, widths, 0.4, numerics);
    };
    const testing::Tensors got = testing::gradients(blocked, in, cotangent);
    const testing::Tensors expected = testing::gradients(expanded, in, cotangent);
    for (size_t i = 0; i < in.size(); ++i) EXPECT_CLOSE(got[i], expected[i], tolerance::kFp64);
  }
}

}  // namespace
}  // namespace furlong
