// The files of a run: metrics, training state, the folder of checkpoints.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/train/checkpoints.h"
#include "furlong/train/metrics.h"
#include "furlong/train/train_state.h"
#include "tests/support/tiny_run.h"

namespace furlong {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing_support::fresh_folder;

TEST(MetricsFile, IsCutBackToAStepAndLosesATornLine) {
  const fs::path path = fresh_folder("metrics") / "metrics.jsonl";
  {
    MetricsFile file(path);
    for (int step = 1; step <= 5; ++step) file.append({{"step", step}, {"loss", 1.0 / step}});
  }
  const std::string whole = read_file(path);
  write_file_atomic(path, whole + "{\"step\": 6, \"lo");
  EXPECT_EQ(MetricsFile::cut(path, 9), 5);
  EXPECT_EQ(read_file(path), whole);
  EXPECT_EQ(MetricsFile::cut(path, 3), 3);
  MetricsFile(path).append({{"step", 4}});
  EXPECT_EQ(MetricsFile::cut(path, 4), 4);
  EXPECT_EQ(MetricsFile::cut(path, 0), 0);
  EXPECT_EQ(read_file(path), "");
}

TEST(MetricsFile, RefusesRecordsOutOfOrder) {
  const fs::path path = fresh_folder("metrics_order") / "metrics.jsonl";
  write_file_atomic(path, "{\"step\":1}\n{\"step\":3}\n");
  EXPECT_THROW(MetricsFile::cut(path, 9), FormatError);
  write_file_atomic(path, "{\"step\":1}\n{\"st\n{\"step\":3}\n");
  EXPECT_THROW(MetricsFile::cut(path, 9), FormatError);
}

void fill(const fs::path& folder) {
  write_file_atomic(folder / "config.json", "{}");
}

TEST(Checkpoints, KeepsTheNewestAndNamesThem) {
  const fs::path run = fresh_folder("checkpoints");
  Checkpoints checkpoints(run, 2);
  for (const int64_t step : {10, 20, 30}) checkpoints.save(step, fill);
  EXPECT_THAT(checkpoints.steps(), ElementsAre(30, 20));
  EXPECT_EQ(read_file(run / "checkpoints" / "latest"), "step-000030\n");
}

TEST(Checkpoints, AFailedSaveLeavesTheOthersAlone) {
  const fs::path run = fresh_folder("checkpoints_failed");
  Checkpoints checkpoints(run, 1);
  checkpoints.save(10, fill);
  const auto full_disk = [](const fs::path& folder) {
    fill(folder);
    throw IoError("no space left on device");
  };
  EXPECT_THROW(checkpoints.save(20, full_disk), IoError);
  EXPECT_THAT(checkpoints.steps(), ElementsAre(10));
  EXPECT_EQ(read_file(run / "checkpoints" / "latest"), "step-000010\n");
}

TEST(Checkpoints, WhatAKilledRunLeftHalfDoneIsNeverACheckpoint) {
  const fs::path run = fresh_folder("checkpoints_killed");
  Checkpoints checkpoints(run, 2);
  checkpoints.save(10, fill);
  make_folders(run / "checkpoints" / ".step-000020.partial");
  EXPECT_THAT(checkpoints.steps(), ElementsAre(10));
  checkpoints.remove_leftovers();
  EXPECT_FALSE(fs::exists(run / "checkpoints" / ".step-000020.partial"));
  checkpoints.set_aside(10);
  EXPECT_TRUE(checkpoints.steps().empty());
}

class TrainStateFile : public testing::Test {
 protected:
  TrainStateFile() : folder_(fresh_folder("train_state")) {
    write_file_atomic(folder_ / "config.json", "{\"a\": 1}");
    state_.step = 7;
    state_.tokens = int64_t{1} << 40;
    state_.cursor = {{"draws", 3}};
    state_.monitor = {{"loss", {1.0 / 3.0}}};
    state_.version = "x";
    write_train_state(folder_, state_);
  }
  std::string refusal() {
    try {
      read_train_state(folder_);
    } catch (const FormatError& error) {
      return error.what();
    }
    return "";
  }
  fs::path folder_;
  TrainState state_;
};

TEST_F(TrainStateFile, ReadsBack) {
  const TrainState again = read_train_state(folder_);
  EXPECT_EQ(Json(again.to_json()), Json(state_.to_json()));
}

TEST_F(TrainStateFile, NamesADamagedFile) {
  write_file_atomic(folder_ / "config.json", "{\"a\": 2}");
  EXPECT_THAT(refusal(), testing::HasSubstr("config.json: the checksum"));
  write_file_atomic(folder_ / "config.json", "{\"a\"");
  EXPECT_THAT(refusal(), testing::HasSubstr("config.json: has 4 bytes, 8 were written"));
  fs::remove(folder_ / "config.json");
  EXPECT_THAT(refusal(), testing::HasSubstr("config.json: is missing"));
}

TEST_F(TrainStateFile, FindsAFlippedDigitInItself) {
  std::string text = read_file(folder_ / "train_state.json");
  const size_t place = text.find("\"step\"");
  text[text.find('7', place)] = '8';
  write_file_atomic(folder_ / "train_state.json", text);
  EXPECT_THAT(refusal(), testing::HasSubstr("train_state.json: the checksum"));
  write_file_atomic(folder_ / "train_state.json", text.substr(0, text.size() / 2));
  EXPECT_NE(refusal(), "");
  fs::remove(folder_ / "train_state.json");
  EXPECT_THAT(refusal(), testing::HasSubstr("is missing"));
}

}  // namespace
}  // namespace furlong
