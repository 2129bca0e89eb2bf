#include "furlong/optim/optimizer.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_svdvals.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <deque>
#include <limits>

#include "furlong/base/error.h"
#include "furlong/base/rng.h"
#include "furlong/optim/muon.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using testing::HasSubstr;

at::Tensor random(std::vector<int64_t> shape, uint64_t seed) {
  at::Tensor result = at::zeros(shape);
  Rng rng(seed);
  auto* values = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < result.numel(); ++i) values[i] = static_cast<float>(rng.normal());
  return result;
}

double relative_error(const at::Tensor& got, const at::Tensor& expected) {
  return got.sub(expected).abs().max().item<double>() / expected.abs().max().item<double>();
}

/// Parameters of every rule and many shapes: heads, experts, tall, wide, single rows, a vector, a frozen one.
class Model {
 public:
  Model() {
    add("heads", {32, 24}, OptimizerRule::kMuon, 4);
    add("experts", {3, 8, 24}, OptimizerRule::kMuon, 3);
    add("experts_back", {3, 24, 8}, OptimizerRule::kMuon, 3);
    add("tall", {40, 16}, OptimizerRule::kMuon, 1);
    add("row", {1, 12}, OptimizerRule::kMuon, 1);
    add("vector", {37}, OptimizerRule::kAdamW, 1);
    add("scale", {}, OptimizerRule::kAdamW, 1);
    add("frozen", {5}, OptimizerRule::kFrozen, 1);
    params[0].spec.weight_decay = false;
  }

  void add(const std::string& name, std::vector<int64_t> shape, OptimizerRule rule, int64_t blocks) {
    at::Tensor& tensor = tensors.emplace_back(random(shape, tensors.size() + 1).requires_grad_(true));
    ParamSpec spec;
    spec.name = name;
    spec.shape = shape;
    spec.rule = rule;
    spec.muon_blocks = blocks;
    params.push_back({spec, &tensor});
  }

  void set_grads(uint64_t seed) {
    for (at::Tensor& tensor : tensors) tensor.mutable_grad() = random(tensor.sizes().vec(), seed++);
  }

  at::Tensor& operator[](size_t i) { return tensors[i]; }

  std::deque<at::Tensor> tensors;
  std::vector<Param> params;
};

TEST(NewtonSchulz, BringsSingularValuesNearOne) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{8, 24}, {24, 8}, {1, 5}, {5, 1}, {17, 33}}) {
    const at::Tensor result = newton_schulz(random({3, rows, cols}, 7), 5, false);
    ASSERT_EQ(result.sizes(), (std::vector<int64_t>{3, rows, cols}));
    const at::Tensor values = at::linalg_svdvals(result);
    // The interval into which five steps bring every value that is not tiny.
    EXPECT_GT(values.min().item<double>(), 0.6);
    EXPECT_LT(values.max().item<double>(), 1.25);
  }
}

TEST(NewtonSchulz, TreatsMatricesOfABatchAlone) {
  const at::Tensor batch = random({4, 6, 10}, 3);
  const at::Tensor together = newton_schulz(batch, 5, false);
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_LE(relative_error(newton_schulz(batch.narrow(0, i, 1), 5, false)[0], together[i]), tolerance::kFp32Chain);
  }
}

TEST(NewtonSchulz, KeepsZeroAndEmptyMatrices) {
  EXPECT_EQ(newton_schulz(at::zeros({2, 3, 5}), 5, true).abs().max().item<double>(), 0.0);
  EXPECT_EQ(newton_schulz(at::zeros({0, 3, 5}), 5, true).size(0), 0);
  EXPECT_EQ(newton_schulz(random({1, 3, 5}, 1).to(at::kDouble), 5, false).scalar_type(), at::kDouble);
  EXPECT_THROW(newton_schulz(at::zeros({3, 5}), 5, true), UsageError);
}

// Kernels and plain tensor operations, over a mixture of shapes that share batches and straddle chunks.
TEST(Muon, MatchesReference) {
  for (const bool nesterov : {true, false}) {
    for (const bool average : {true, false}) {
      MuonConfig config;
      config.bf16 = false;
      config.nesterov = nesterov;
      config.average_momentum = average;
      std::vector<MuonParam> ours;
      std::vector<MuonParam> reference;
      uint64_t seed = 1;
      const struct {
        std::vector<int64_t> shape;
        int64_t blocks;
      } cases[] = {{{32, 24}, 4}, {{5, 8, 24}, 5}, {{5, 24, 8}, 5},     {{1, 9}, 1}, {{9, 1}, 1},
                   {{17, 35}, 1}, {{70, 35}, 2},   {{60, 96, 128}, 60}, {{0, 8}, 1}, {{40, 128, 96}, 40}};
      for (const auto& [shape, blocks] : cases) {
        const MuonParam param{random(shape, seed), random(shape, seed + 1), random(shape, seed + 2), blocks,
                              seed % 2 == 0};
        reference.push_back({param.weight.clone(), param.grad, param.momentum.clone(), blocks, param.weight_decay});
        ours.push_back(param);
        seed += 3;
      }
      muon_step(ours, config, 0.1);
      muon_step_reference(reference, config, 0.1);
      for (size_t i = 0; i < ours.size(); ++i) {
        if (ours[i].weight.numel() == 0) continue;
        EXPECT_LE(relative_error(ours[i].weight, reference[i].weight), tolerance::kFp32Chain) << i;
        EXPECT_LE(relative_error(ours[i].momentum, reference[i].momentum), tolerance::kFp32) << i;
      }
    }
  }
}

// Per-head Muon is whole-matrix Muon of the heads' matrices; a stacked tensor is its experts one by one.
TEST(Muon, BlocksAreMatricesOfTheirOwn) {
  MuonConfig config;
  config.bf16 = false;
  const MuonParam whole{random({12, 10}, 1), random({12, 10}, 2), at::zeros({12, 10}), 3, true};
  std::vector<MuonParam> parts;
  for (int64_t i = 0; i < 3; ++i) {
    const auto part = [i](const at::Tensor& tensor) { return tensor.narrow(0, 4 * i, 4).clone(); };
    parts.push_back({part(whole.weight), part(whole.grad), part(whole.momentum), 1, true});
  }
  muon_step({whole}, config, 0.1);
  muon_step(parts, config, 0.1);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_LE(relative_error(whole.weight.narrow(0, 4 * i, 4), parts[i].weight), tolerance::kFp32Chain);
  }
}

// One head's gradient a thousand times larger than the others': its update must not drown theirs.
TEST(Muon, HeadsGetUpdatesOfOneSize) {
  at::Tensor grad = random({32, 24}, 5);
  grad.narrow(0, 0, 8).mul_(1000.0);
  const auto spread = [&](int64_t blocks) {
    const MuonParam param{at::zeros({32, 24}), grad, at::zeros({32, 24}), blocks, true};
    muon_step({param}, {}, 1.0);
    const at::Tensor rms = param.weight.view({4, -1}).square().mean(1).sqrt();
    return rms.max().item<double>() / rms.min().item<double>();
  };
  EXPECT_LT(spread(4), 1.1);
  EXPECT_GT(spread(1), 2.0);
}

TEST(Muon, UpdateHasTheStatedRms) {
  const MuonParam param{at::zeros({64, 64}), random({64, 64}, 5), at::zeros({64, 64}), 1, true};
  muon_step({param}, {}, 0.5);
  // Singular values near one, of a square matrix: RMS = 0.2 lr within the spread of the iteration (0.68 to 1.13).
  EXPECT_NEAR(param.weight.square().mean().sqrt().item<double>(), 0.1, 0.02);
}

// In bf16 the products round to 8 bits, five times over; small singular values amplify it. The bound is the golden
// cases' recommendation, relative to the update.
TEST(Muon, Bf16ProductsStayNearFp32) {
  const auto update = [](bool bf16) {
    MuonConfig config;
    config.bf16 = bf16;
    const MuonParam param{at::zeros({96, 192}), random({96, 192}, 5), at::zeros({96, 192}), 1, true};
    muon_step({param}, config, 1.0);
    return param.weight;
  };
  EXPECT_LE(relative_error(update(true), update(false)), 0.05);
}

TEST(Optimizer, FollowsTheRuleOfEachParameter) {
  Model model;
  std::vector<at::Tensor> before;
  for (at::Tensor& tensor : model.tensors) before.push_back(tensor.detach().clone());
  Optimizer optimizer(model.params, {});
  EXPECT_EQ(optimizer.state().size(), 5u + 2u * 2u);
  model.set_grads(100);
  model[5].mutable_grad() = at::Tensor();  // no gradient: left alone
  optimizer.step(0.01);
  EXPECT_EQ(optimizer.num_steps(), 1);
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(model[i].detach().equal(before[i]), i == 5 || i == 7) << model.params[i].spec.name;
  }
  // First AdamW step: the rate times the sign of the gradient, after decay.
  const double expected = before[6].item<double>() * (1 - 0.001) - 0.01 * model[6].grad().sign().item<double>();
  EXPECT_NEAR(model[6].item<double>(), expected, 1e-6);
  optimizer.zero_grad();
  EXPECT_FALSE(model[0].grad().defined());
}

TEST(Optimizer, DecaysOnlyWhereAsked) {
  Model model;
  at::Tensor plain = model[0].detach().clone();
  const at::Tensor decayed = model[3].detach().clone();
  Optimizer optimizer(model.params, {});
  for (at::Tensor& tensor : model.tensors) tensor.mutable_grad() = at::zeros(tensor.sizes());
  optimizer.step(0.5);
  EXPECT_TRUE(model[0].detach().equal(plain));
  EXPECT_LE(relative_error(model[3].detach(), decayed.mul(0.95)), tolerance::kFp32);
}

TEST(Optimizer, CanUseAdamWForEverything) {
  Model model;
  OptimizerConfig config;
  config.use_muon = false;
  config.adamw_lr_scale = 0.5;
  Optimizer optimizer(model.params, config);
  EXPECT_EQ(optimizer.state().size(), 2u * 7u);
  const at::Tensor before = model[0].detach().clone();
  model.set_grads(1);
  optimizer.step(0.01);
  EXPECT_LE(relative_error(before.sub(model[0].detach()), model[0].grad().sign().mul(0.005)), 1e-4);
}

TEST(Optimizer, ResumesToTheBit) {
  Model model;
  Optimizer optimizer(model.params, {});
  Model resumed_model;
  std::vector<std::pair<std::string, at::Tensor>> saved;
  for (uint64_t step = 0; step < 6; ++step) {
    if (step == 3) {
      for (const auto& [name, tensor] : optimizer.state()) saved.emplace_back(name, tensor.clone());
      for (size_t i = 0; i < model.tensors.size(); ++i) {
        resumed_model[i] = model[i].detach().clone().requires_grad_(true);
      }
    }
    model.set_grads(step * 100);
    optimizer.step(0.01);
  }
  Optimizer resumed(resumed_model.params, {});
  resumed.load_state(saved, 3);
  for (uint64_t step = 3; step < 6; ++step) {
    resumed_model.set_grads(step * 100);
    resumed.step(0.01);
  }
  for (size_t i = 0; i < model.tensors.size(); ++i) EXPECT_TRUE(model[i].equal(resumed_model[i])) << i;
  EXPECT_EQ(resumed.num_steps(), 6);
  for (size_t i = 0; i < optimizer.state().size(); ++i) {
    EXPECT_TRUE(optimizer.state()[i].second.equal(resumed.state()[i].second)) << optimizer.state()[i].first;
  }
}

TEST(Optimizer, RefusesStateThatDoesNotFit) {
  Model model;
  Optimizer optimizer(model.params, {});
  auto state = optimizer.state();
  const auto refusal = [&] {
    try {
      optimizer.load_state(state, 1);
    } catch (const FormatError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refusal(), "accepted");
  state[0].second = at::zeros({2, 2});
  EXPECT_THAT(refusal(), HasSubstr("'heads.momentum': got [2, 2], need [32, 24]"));
  state.erase(state.begin());
  EXPECT_THAT(refusal(), HasSubstr("'heads.momentum' is missing"));
}

TEST(Optimizer, RefusesParametersThatAreNotMasters) {
  const auto refusal = [](at::Tensor tensor, int64_t blocks) {
    ParamSpec spec;
    spec.name = "w";
    spec.rule = OptimizerRule::kMuon;
    spec.muon_blocks = blocks;
    try {
      const Optimizer optimizer({{spec, &tensor}}, {});
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refusal(at::zeros({6, 4}), 3), "accepted");
  EXPECT_THAT(refusal(at::zeros({6, 4}, at::kBFloat16), 3), HasSubstr("[optimizer] w: got BFloat16, need Float"));
  EXPECT_THAT(refusal(at::zeros({6, 4}), 4), HasSubstr("6 rows do not divide into 4 blocks"));
  EXPECT_THAT(refusal(at::zeros({6}), 1), HasSubstr("Muon needs a matrix"));
  EXPECT_THAT(refusal(at::zeros({6, 4}).t(), 1), HasSubstr("contiguous"));
  EXPECT_THAT(refusal(at::Tensor(), 1), HasSubstr("no tensor"));
}

TEST(ClipGradNorm, ScalesToTheLimit) {
  Model model;
  model.set_grads(1);
  double expected = 0.0;
  for (const at::Tensor& tensor : model.tensors)
    expected += tensor.grad().to(at::kDouble).square().sum().item<double>();
  const at::Tensor before = model[0].grad().clone();
  EXPECT_NEAR(clip_grad_norm(model.params, 0.0), std::sqrt(expected), 1e-9);
  EXPECT_NEAR(clip_grad_norm(model.params, 1e6), std::sqrt(expected), 1e-9);
  EXPECT_TRUE(model[0].grad().equal(before));
  clip_grad_norm(model.params, 0.5);
  EXPECT_NEAR(clip_grad_norm(model.params, 0.0), 0.5, 1e-6);
}

TEST(ClipGradNorm, LeavesNonFiniteGradientsAlone) {
  Model model;
  model.set_grads(1);
  const at::Tensor before = model[0].grad().clone();
  model[5].mutable_grad()[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(clip_grad_norm(model.params, 0.5)));
  model[5].mutable_grad()[3] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isinf(clip_grad_norm(model.params, 0.5)));
  EXPECT_TRUE(model[0].grad().equal(before));
}

TEST(ClipGradNorm, IsTheSameForAnyNumberOfThreads) {
  Model model;
  model.add("large", {3 << 16}, OptimizerRule::kAdamW, 1);
  for (at::Tensor& tensor : model.tensors) tensor.mutable_grad() = at::randn(tensor.sizes());
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const double one = clip_grad_norm(model.params, 0.0);
  omp_set_num_threads(3);
  EXPECT_EQ(clip_grad_norm(model.params, 0.0), one);
  omp_set_num_threads(threads);
  EXPECT_EQ(clip_grad_norm({}, 1.0), 0.0);
}

}  // namespace
}  // namespace furlong
