// A run that is cut and resumed writes the same metrics, to the bit, as one that is not.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <sstream>
#include <stdexcept>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/checkpoint/run_folder.h"
#include "furlong/model/weights.h"
#include "furlong/train/trainer.h"
#include "tests/support/tiny_run.h"

namespace furlong {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing_support::fresh_folder;
using testing_support::tiny_config;

const fs::path& data() {
  static const fs::path folder = [] {
    auto path = fresh_folder("resume_data");
    testing_support::write_tiny_shards(path, 40, 50);
    return path;
  }();
  return folder;
}

struct Cut : std::runtime_error {
  Cut() : std::runtime_error("cut") {}
};

/// Trains until the end, or until an exception after step `cut_at`: what SIGKILL leaves behind.
void train(const fs::path& out, bool resume, int64_t cut_at = -1, const std::vector<std::string>& assignments = {}) {
  Progress silent(nullptr, false, 1);
  TrainOptions options{.out = out, .resume = resume};
  options.after_step = [cut_at](const StepMetrics& metrics) {
    if (metrics.step == cut_at) throw Cut();
  };
  try {
    Trainer(tiny_config(data(), assignments), options, silent).run();
  } catch (const Cut&) {
  }
}

/// The records without what depends on time.
std::vector<std::string> records(const fs::path& out) {
  std::vector<std::string> lines;
  std::istringstream text(read_file(out / "metrics.jsonl"));
  std::string line;
  while (std::getline(text, line)) {
    Json record = Json::parse(line);
    for (const char* key : {"tokens_per_s", "seconds", "elapsed", "rss_bytes", "peak_rss_bytes"}) {
      EXPECT_EQ(record.erase(key), 1u) << key;
    }
    lines.push_back(record.dump());
  }
  return lines;
}

const std::vector<std::string>& uninterrupted() {
  static const std::vector<std::string> lines = [] {
    const fs::path out = fresh_folder("resume_whole");
    train(out, false);
    return records(out);
  }();
  return lines;
}

std::string failure(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Resume, EveryStepStandsOnceAndLossFalls) {
  ASSERT_EQ(uninterrupted().size(), 18u);
  const Json first = Json::parse(uninterrupted().front()), last = Json::parse(uninterrupted().back());
  EXPECT_EQ(first["step"], 1);
  EXPECT_EQ(last["step"], 18);
  EXPECT_EQ(last["stage"], "long");
  EXPECT_EQ(last["tokens"], 18 * 128);
  EXPECT_LT(last["loss"].get<double>(), first["loss"].get<double>() - 0.5);
  EXPECT_TRUE(last.contains("position_loss"));
}

// Before the first checkpoint, just after one, between two, at the border of the stages, after it, before the end.
TEST(Resume, IsBitIdenticalFromAnyCut) {
  for (const int64_t cut : {3, 5, 8, 12, 13, 17}) {
    const fs::path out = fresh_folder("resume_cut");
    train(out, false, cut);
    train(out, true);
    EXPECT_EQ(records(out), uninterrupted()) << "cut after step " << cut;
  }
}

TEST(Resume, IsBitIdenticalAfterManyCuts) {
  const fs::path out = fresh_folder("resume_many");
  train(out, false, 4);
  for (const int64_t cut : {6, 9, 11, 14, 16}) train(out, true, cut);
  train(out, true);
  EXPECT_EQ(records(out), uninterrupted());
}

TEST(Resume, AfterAnOrderlyStopGoesOnFromThatVeryStep) {
  const fs::path out = fresh_folder("resume_stop");
  Progress silent(nullptr, false, 1);
  int64_t asked = 0;
  TrainOptions options{.out = out};
  options.should_stop = [&] { return ++asked == 7; };
  Trainer trainer(tiny_config(data()), options, silent);
  EXPECT_EQ(trainer.run(), TrainEnd::kStopped);
  EXPECT_EQ(find_checkpoint(out).filename(), "step-000007");
  train(out, true);
  EXPECT_EQ(records(out), uninterrupted());
}

TEST(Resume, PassesOverADamagedCheckpointToTheOneBefore) {
  const fs::path out = fresh_folder("resume_damaged");
  train(out, false, 11);
  const fs::path weights = find_checkpoint(out) / "model.safetensors";
  EXPECT_EQ(find_checkpoint(out).filename(), "step-000010");
  std::string bytes = read_file(weights);
  bytes[bytes.size() / 2] ^= 1;
  write_file_atomic(weights, bytes);
  train(out, true);
  EXPECT_EQ(records(out), uninterrupted());
  EXPECT_TRUE(fs::exists(out / "checkpoints" / "step-000010.damaged"));
}

TEST(Resume, WithoutAWholeCheckpointRefusesAndTouchesNothing) {
  const fs::path out = fresh_folder("resume_none_whole");
  train(out, false, 6);
  fs::resize_file(out / "checkpoints" / "step-000005" / "optimizer.safetensors", 100);
  const std::string before = read_file(out / "metrics.jsonl");
  EXPECT_THAT(failure([&] { train(out, true); }), HasSubstr("no checkpoint is whole"));
  EXPECT_EQ(read_file(out / "metrics.jsonl"), before);
  EXPECT_TRUE(fs::exists(out / "checkpoints" / "step-000005"));
}

TEST(Resume, RefusesAnOccupiedFolderAndAnotherConfiguration) {
  const fs::path out = fresh_folder("resume_refuse");
  train(out, false, 6);
  EXPECT_THAT(failure([&] { train(out, false); }), HasSubstr("holds a run already; add --resume"));
  EXPECT_THAT(failure([&] { train(out, true, -1, {"schedule.peak_lr=1e-3"}); }), HasSubstr("schedule.peak_lr: 0.005"));
  EXPECT_THAT(failure([&] { train(out, true, -1, {"stages.1.steps=9"}); }), HasSubstr("stages.1.steps: 6"));
}

TEST(Checkpoint, HoldsThePublishedFormAndLoads) {
  const fs::path out = fresh_folder("resume_published");
  train(out, false);
  const fs::path folder = find_checkpoint(out);
  for (const char* name : {"config.json", "model.safetensors", "optimizer.safetensors", "train_state.json"}) {
    EXPECT_TRUE(fs::exists(folder / name)) << name;
  }
  EXPECT_EQ(load_decoder(folder, at::kFloat, at::kCPU)->config().hidden_size, 64);
}

}  // namespace
}  // namespace furlong
