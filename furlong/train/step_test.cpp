#include "furlong/train/step.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "furlong/ops/moe/layer.h"
#include "tests/support/tiny_run.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using testing_support::fresh_folder;
using testing_support::tiny_config;
using testing_support::write_tiny_shards;

/// A model after one forward and backward, or one step, of the same 4 rows in micro-batches of `micro_rows`.
class Tiny {
 public:
  Tiny() : config_(tiny_config(data())), decoder_(config_.model) {
    decoder_.initialize(5, at::kFloat, at::kCPU, true);
    for (MoeLayer* layer : decoder_.moe_layers()) {
      if (layer != nullptr) layer->enable_balancing(1000);
    }
    optimizer_ = std::make_unique<Optimizer>(decoder_.params(), config_.optimizer);
  }

  static std::vector<Batch> batches(int64_t micro_rows) {
    Loader loader({{"tiny", data().string(), 1.0}}, 32, 3);
    std::vector<Batch> list;
    for (int64_t row = 0; row < 4; row += micro_rows) list.push_back(loader.next(micro_rows));
    return list;
  }
  StepOutcome take(const std::vector<Batch>& batches, bool recompute = false) {
    Monitor monitor(config_.monitor);
    return take_step(decoder_, *optimizer_, monitor, batches, {.lr = 1e-2, .clip = 1.0, .recompute = recompute});
  }
  at::Tensor gradients(const std::vector<Batch>& batches) {
    optimizer_->zero_grad();
    StepOutcome outcome;
    loss_ = accumulate_gradients(decoder_, batches, {}, outcome).loss;
    std::vector<at::Tensor> all;
    for (const Param& param : decoder_.params()) {
      if (param.tensor->grad().defined()) all.push_back(param.tensor->grad().reshape(-1));
    }
    return at::cat(all);
  }
  at::Tensor biases() const {
    std::vector<at::Tensor> all;
    for (MoeLayer* layer : decoder_.moe_layers()) {
      if (layer != nullptr) all.push_back(layer->correction_bias_E());
    }
    return at::cat(all).clone();
  }
  at::Tensor weights() const {
    std::vector<at::Tensor> all;
    for (const Param& param : decoder_.params()) all.push_back(param.tensor->detach().reshape(-1));
    return at::cat(all).clone();
  }
  at::Tensor& parameter(const std::string& name) {
    for (const Param& param : decoder_.params()) {
      if (param.spec.name == name) return *param.tensor;
    }
    throw std::out_of_range(name);
  }
  double loss() const { return loss_; }
  const Optimizer& optimizer() const { return *optimizer_; }

 private:
  static std::filesystem::path data() {
    static const std::filesystem::path folder = [] {
      auto path = fresh_folder("step_test");
      write_tiny_shards(path, 40, 50);
      return path;
    }();
    return folder;
  }

  TrainConfig config_;
  Decoder decoder_;
  std::unique_ptr<Optimizer> optimizer_;
  double loss_ = 0.0;
};

double relative(const at::Tensor& a, const at::Tensor& b) {
  return a.sub(b).abs().max().item<double>() / b.abs().max().item<double>();
}

TEST(Step, MicroBatchesChangeOnlyTheOrderOfSums) {
  Tiny whole, split;
  const at::Tensor expected = whole.gradients(Tiny::batches(4));
  EXPECT_NEAR(whole.loss(), std::log(256.0), 0.2);
  for (const int64_t micro_rows : {2, 1}) {
    const at::Tensor got = split.gradients(Tiny::batches(micro_rows));
    EXPECT_NEAR(split.loss(), whole.loss(), tolerance::kFp32Chain);
    EXPECT_LE(relative(got, expected), tolerance::kFp32Chain) << micro_rows << " rows a micro-batch";
  }
}

TEST(Step, BiasesAreTheSameForAnyMicroBatch) {
  Tiny whole, halves, quarters;
  whole.take(Tiny::batches(4));
  halves.take(Tiny::batches(2));
  quarters.take(Tiny::batches(1));
  EXPECT_GT(whole.biases().abs().max().item<double>(), 0.0);
  EXPECT_TRUE(at::equal(whole.biases(), halves.biases()));
  EXPECT_TRUE(at::equal(whole.biases(), quarters.biases()));
}

TEST(Step, RecomputationChangesNothing) {
  Tiny kept, recomputed;
  for (int step = 0; step < 3; ++step) {
    const StepOutcome a = kept.take(Tiny::batches(2));
    const StepOutcome b = recomputed.take(Tiny::batches(2), true);
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.grad_norm, b.grad_norm);
  }
  EXPECT_TRUE(at::equal(kept.biases(), recomputed.biases()));
  EXPECT_TRUE(at::equal(kept.weights(), recomputed.weights()));
}

TEST(Step, LoadsCountEveryTokenOnce) {
  Tiny tiny;
  const StepOutcome outcome = tiny.take(Tiny::batches(1), true);
  EXPECT_EQ(outcome.tokens, 4 * 32);
  int routers = 0;
  for (const LayerStatistics& layer : outcome.statistics.layers()) {
    if (layer.load.empty()) continue;
    ++routers;
    double sum = 0.0;
    for (const double tokens : layer.load) sum += tokens;
    EXPECT_EQ(sum, 4 * 32 * 2);
  }
  EXPECT_EQ(routers, 4);
}

/// A step that must be skipped: nothing of the model or the optimizer moves, and the next good step is taken.
void expect_skipped(Tiny& tiny, at::Tensor damaged, const std::string& reason) {
  const at::Tensor good = damaged.clone();
  const at::Tensor before = tiny.weights();
  damaged.fill_(NAN);
  const StepOutcome outcome = tiny.take(Tiny::batches(2));
  EXPECT_EQ(outcome.verdict.kind, Verdict::Kind::kSkip);
  EXPECT_THAT(outcome.verdict.reason, testing::HasSubstr(reason));
  EXPECT_EQ(tiny.optimizer().num_steps(), 0);
  damaged.copy_(good);
  EXPECT_TRUE(at::equal(tiny.weights(), before));
  EXPECT_TRUE(tiny.take(Tiny::batches(2)).verdict.take());
}

TEST(Step, ANonFiniteLossIsSkipped) {
  Tiny tiny;
  expect_skipped(tiny, tiny.parameter("lm_head.weight").detach(), "loss is not finite");
}

TEST(Step, ANonFiniteRouterScoreIsSkipped) {
  Tiny tiny;
  expect_skipped(tiny, tiny.parameter("model.embed_tokens.weight").detach(), "score");
}

TEST(Step, SkippedCountsDoNotReachTheNextUpdate) {
  Tiny fresh, skipped;
  const at::Tensor head = skipped.parameter("lm_head.weight").detach();
  const at::Tensor good = head.clone();
  head.fill_(NAN);
  skipped.take(Tiny::batches(4));
  head.copy_(good);
  fresh.take(Tiny::batches(4));
  skipped.take(Tiny::batches(4));
  EXPECT_TRUE(at::equal(fresh.biases(), skipped.biases()));
  EXPECT_TRUE(at::equal(fresh.weights(), skipped.weights()));
}

}  // namespace
}  // namespace furlong
