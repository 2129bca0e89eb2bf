#include "furlong/train/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "furlong/train/stages.h"
#include "tests/support/tiny_run.h"

namespace furlong {
namespace {

using testing::HasSubstr;
using testing_support::tiny_config;

std::string refusal(const std::vector<std::string>& assignments) {
  try {
    tiny_config("data", assignments);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(TrainConfig, NamesTheKeyThatIsWrong) {
  EXPECT_THAT(refusal({"schedule.peak_lrr=1e-3"}),
              HasSubstr("unknown key 'schedule.peak_lrr' (did you mean 'peak_lr'?)"));
  EXPECT_THAT(refusal({"stages.1.micro_rows=3"}), HasSubstr("stages.1.micro_rows"));
  EXPECT_THAT(refusal({"stages.0.tokens=1000"}), HasSubstr("needs tokens or steps"));
  EXPECT_THAT(refusal({"stages.0.context=100000"}), HasSubstr("stages.0.context"));
  EXPECT_THAT(refusal({"stages.0.weights=[1.0, 2.0]"}), HasSubstr("stages.0.weights"));
  EXPECT_THAT(refusal({"data.sources.0.weight=0.0"}), HasSubstr("all weights are zero"));
  EXPECT_THAT(refusal({"optimizer.muon.momentum=1.5"}), HasSubstr("optimizer.muon.momentum"));
  EXPECT_THAT(refusal({"device=\"tpu\""}), HasSubstr("device"));
}

TEST(TrainConfig, SetReachesIntoTheModelFile) {
  EXPECT_EQ(tiny_config("data", {"model.moe.num_experts=16"}).model.moe.num_experts, 16);
}

TEST(TrainConfig, ItsTomlReadsBackToTheSame) {
  const TrainConfig config = tiny_config("data", {"stages.1.weights=[2.0]", "clip=0.5"});
  const TrainConfig again = TrainConfig::from_document(ConfigDocument::from_text(config.to_toml(), "again"), ".");
  EXPECT_EQ(config.resolved().dump(), again.resolved().dump());
}

TEST(TrainConfig, DifferencesAreNamedUnlessTheyDoNotMatter) {
  const OrderedJson saved = tiny_config("data").resolved();
  const auto against = [&](const std::string& assignment) {
    return first_difference(saved, tiny_config("data", {assignment}).resolved());
  };
  EXPECT_EQ(against("checkpoint.keep=9"), "");
  EXPECT_EQ(against("threads=7"), "");
  EXPECT_EQ(against("data.sources.0.path=\"elsewhere\""), "");
  EXPECT_EQ(against("stages.1.steps=7"), "stages.1.steps: 6 in the checkpoint, 7 now");
  EXPECT_THAT(against("model.moe.num_experts=16"), HasSubstr("model."));
  // As it comes back from a checkpoint, with its keys sorted.
  EXPECT_EQ(first_difference(OrderedJson(Json(saved)), saved), "");
}

TEST(StagePlan, RoundsTokensUpToSteps) {
  std::vector<StageConfig> stages(2);
  stages[0].context = 10;
  stages[0].tokens = 101;
  stages[0].rows = 2;
  stages[1].context = 20;
  stages[1].steps = 3;
  stages[1].rows = 1;
  const StagePlan plan(stages);
  EXPECT_EQ(plan.total_steps(), 9);
  EXPECT_EQ(plan.total_tokens(), 6 * 20 + 3 * 20);
  EXPECT_EQ(plan.stage_of(5), 0);
  EXPECT_EQ(plan.stage_of(6), 1);
  EXPECT_TRUE(plan.is_last_of_stage(5));
  EXPECT_TRUE(plan.is_last_of_stage(8));
  EXPECT_FALSE(plan.is_last_of_stage(6));
}

}  // namespace
}  // namespace furlong
