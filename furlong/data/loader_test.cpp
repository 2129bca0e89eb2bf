#include "furlong/data/loader.h"

#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/rng.h"
#include "furlong/data/shard_writer.h"

namespace furlong {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class LoaderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("furlong_loader_test_" + std::to_string(getpid()));
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  /// A folder of documents of these lengths, in which no two tokens are equal: they count up from `first_token`.
  SourceConfig source(const std::string& name, const std::vector<int64_t>& lengths, double weight = 1.0,
                      int64_t first_token = 0) {
    make_folders(root_ / name);
    ShardWriter writer(root_ / name, 100'000, 64);
    for (const int64_t length : lengths) {
      std::vector<int64_t> tokens;
      for (int64_t i = 0; i < length; ++i) tokens.push_back(first_token++);
      writer.add_document(tokens, length);
    }
    writer.finish("digest", -1);
    return {name, (root_ / name).string(), weight};
  }

  /// Lengths from 2 tokens to several rows.
  static std::vector<int64_t> mixed_lengths(int64_t documents) {
    Rng rng(5);
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < documents; ++i)
      lengths.push_back(2 + static_cast<int64_t>(rng.below(i % 7 == 0 ? 90 : 20)));
    return lengths;
  }

  template <typename Call>
  static std::string refusal(const Call& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  fs::path root_;
};

std::vector<int64_t> values(const at::Tensor& tensor) {
  const auto* data = tensor.const_data_ptr<int64_t>();
  return {data, data + tensor.numel()};
}

bool same(const Batch& a, const Batch& b) {
  return at::equal(a.tokens_N, b.tokens_N) && at::equal(a.targets_N, b.targets_N) &&
         at::equal(a.weight_N, b.weight_N) && at::equal(a.layout.offsets_host(), b.layout.offsets_host()) &&
         a.num_targets == b.num_targets;
}

/// Where each token of the source stands.
struct Place {
  int64_t document;
  bool first, last;
};
std::vector<Place> places(const std::vector<int64_t>& lengths) {
  std::vector<Place> result;
  for (size_t d = 0; d < lengths.size(); ++d) {
    for (int64_t i = 0; i < lengths[d]; ++i) result.push_back({static_cast<int64_t>(d), i == 0, i + 1 == lengths[d]});
  }
  return result;
}

TEST_F(LoaderTest, TargetsAreTheNextTokensOfTheSameDocument) {
  const auto lengths = mixed_lengths(60);
  const auto place = places(lengths);
  Loader loader({source("a", lengths)}, 16, 1);
  for (int step = 0; step < 50; ++step) {
    const Batch batch = loader.next(3);
    const auto tokens = values(batch.tokens_N), targets = values(batch.targets_N);
    const auto* weights = batch.weight_N.const_data_ptr<float>();
    ASSERT_EQ(batch.layout.num_tokens(), 48);
    int64_t num_targets = 0;
    for (int64_t b = 0; b < batch.layout.num_sequences(); ++b) {
      const int64_t start = batch.layout.start(b), length = batch.layout.length(b);
      ASSERT_GT(length, 0);
      ASSERT_EQ(start / 16, (start + length - 1) / 16) << "a sequence crosses rows";
      for (int64_t n = start; n < start + length; ++n) {
        ASSERT_EQ(tokens[n], tokens[start] + n - start);
        ASSERT_EQ(place[tokens[n]].document, place[tokens[start]].document);
        ASSERT_EQ(weights[n], place[tokens[n]].last ? 0.0f : 1.0f);
        ASSERT_EQ(targets[n], place[tokens[n]].last ? tokens[n] : tokens[n] + 1);
        num_targets += place[tokens[n]].last ? 0 : 1;
      }
    }
    ASSERT_EQ(batch.num_targets, num_targets);
  }
}

TEST_F(LoaderTest, AnEpochHoldsEveryTokenOnce) {
  // Lanes reach into the next epoch while others are still in the last, so epochs are counted by document: the second
  // reading of any document begins after the first of every other, and readings are whole and in order: no token comes
  // more often than the one before it, and in the end all have come.
  const auto lengths = mixed_lengths(80);
  const auto place = places(lengths);
  Loader loader({source("a", lengths)}, 16, 1);
  std::vector<int64_t> readings(lengths.size()), seen(place.size());
  for (int step = 0; step < 400; ++step) {
    for (const int64_t token : values(loader.next(2).tokens_N)) {
      const auto document = static_cast<size_t>(place[token].document);
      if (place[token].first) {
        ++readings[document];
        ASSERT_LE(readings[document] - *std::min_element(readings.begin(), readings.end()), 1);
      }
      ++seen[token];
      ASSERT_LE(seen[token], place[token].first ? readings[document] : seen[token - 1]);
    }
  }
  EXPECT_GE(*std::min_element(seen.begin(), seen.end()), 5);
}

TEST_F(LoaderTest, OneDocumentIsReadInOrder) {
  Loader loader({source("a", {40})}, 16, 1);
  std::vector<int64_t> tokens;
  for (int row = 0; row < 5; ++row) {
    const auto more = values(loader.next(1).tokens_N);
    tokens.insert(tokens.end(), more.begin(), more.end());
  }
  for (size_t n = 0; n < tokens.size(); ++n) EXPECT_EQ(tokens[n], static_cast<int64_t>(n % 40));
}

TEST_F(LoaderTest, RowsOfABatchComeFromDifferentDocuments) {
  Loader loader({source("a", std::vector<int64_t>(40, 1000))}, 16, 1);
  std::map<int64_t, int> rows;
  for (const int64_t token : values(loader.next(16).tokens_N)) ++rows[token / 1000];
  EXPECT_EQ(rows.size(), 16u);
}

TEST_F(LoaderTest, OrderDependsOnSeedAndEpoch) {
  const auto config = source("a", mixed_lengths(60));
  Loader first({config}, 16, 1), again({config}, 16, 1), other({config}, 16, 2);
  const Batch batch = first.next(8);
  EXPECT_TRUE(same(batch, again.next(8)));
  EXPECT_FALSE(same(batch, other.next(8)));
  std::vector<std::vector<int64_t>> epochs(2);
  Loader single({source("b", std::vector<int64_t>(40, 2))}, 2, 1);
  for (auto& epoch : epochs) {
    for (int row = 0; row < 40; ++row) epoch.push_back(values(single.next(1).tokens_N)[0]);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  for (auto& epoch : epochs) std::sort(epoch.begin(), epoch.end());
  EXPECT_EQ(epochs[0], epochs[1]);
}

TEST_F(LoaderTest, ResumesAtEveryCutAsIfUninterrupted) {
  const std::vector<SourceConfig> sources = {source("a", mixed_lengths(45)), source("b", {3, 50, 2}, 0.4)};
  Loader whole(sources, 16, 7);
  std::vector<LoaderState> states;
  std::vector<Batch> batches;
  for (int step = 0; step < 60; ++step) {
    states.push_back(whole.state());
    batches.push_back(whole.next(2));
  }
  for (size_t cut = 0; cut < states.size(); ++cut) {
    Loader resumed(sources, 16, 7);
    resumed.restore({parse_json(states[cut].values.dump(), "state")});
    for (size_t step = cut; step < std::min(cut + 8, batches.size()); ++step) {
      ASSERT_TRUE(same(resumed.next(2), batches[step])) << "cut " << cut << ", step " << step;
    }
  }
}

TEST_F(LoaderTest, CursorsCarryOverToAnotherContext) {
  const auto lengths = mixed_lengths(80);
  const auto place = places(lengths);
  const auto config = source("a", lengths);
  Loader shorter({config}, 16, 1);
  std::vector<int64_t> seen(place.size());
  for (int step = 0; step < 5; ++step) {
    for (const int64_t token : values(shorter.next(2).tokens_N)) ++seen[token];
  }
  Loader longer({config}, 64, 1);
  longer.restore(shorter.state());
  for (int step = 0; step < 2; ++step) {
    for (const int64_t token : values(longer.next(2).tokens_N)) ++seen[token];
  }
  // Far fewer tokens than an epoch were drawn: none may come twice.
  EXPECT_EQ(*std::max_element(seen.begin(), seen.end()), 1);
}

TEST_F(LoaderTest, MixesSourcesByWeight) {
  const std::vector<SourceConfig> sources = {source("a", {30, 40}, 3.0, 0), source("b", {50}, 1.0, 1000),
                                             source("c", {60}, 0.0, 2000)};
  Loader loader(sources, 8, 9);
  std::vector<int64_t> rows(3);
  for (int64_t row = 1; row <= 4000; ++row) {
    ++rows[static_cast<size_t>(values(loader.next(1).tokens_N)[0] / 1000)];
    ASSERT_NEAR(static_cast<double>(rows[0]), 0.75 * static_cast<double>(row), 4.0);
  }
  EXPECT_EQ(rows[2], 0);
}

TEST_F(LoaderTest, StagesMayUseOtherSources) {
  const auto a = source("a", mixed_lengths(40)), b = source("b", mixed_lengths(30), 1.0, 50'000);
  Loader both({a, b}, 16, 1), untouched({a, b}, 16, 1);
  both.next(6);
  untouched.next(6);
  Loader only_b({b}, 16, 1);
  only_b.restore(both.state());
  Loader again({a, b}, 16, 1);
  again.restore(only_b.state());
  EXPECT_TRUE(same(again.next(4), untouched.next(4)));
}

TEST_F(LoaderTest, AMovedFolderKeepsItsCursor) {
  auto config = source("a", mixed_lengths(40));
  config.name = "";
  Loader before({config}, 16, 1);
  before.next(6);
  fs::rename(root_ / "a", root_ / "moved");
  config.path = (root_ / "moved").string();
  Loader after({config}, 16, 1);
  after.restore(before.state());
  EXPECT_TRUE(same(after.next(4), before.next(4)));
}

TEST_F(LoaderTest, ShortDocumentsNeverMakeAnEmptyBatch) {
  Loader loader({source("a", {1, 2, 0, 1, 3, 1})}, 2, 1);
  for (int step = 0; step < 20; ++step) EXPECT_GE(loader.next(1).num_targets, 1);
  EXPECT_THAT(refusal([&] { Loader({source("b", {1, 0, 1})}, 16, 1); }),
              HasSubstr("b: no document has 2 tokens or more"));
}

TEST_F(LoaderTest, RefusesWhatCannotWork) {
  const auto a = source("a", {10, 20});
  EXPECT_THAT(refusal([&] { Loader({a}, 1, 1); }), HasSubstr("context: got 1, need 2"));
  EXPECT_THAT(refusal([&] { Loader({}, 16, 1); }), HasSubstr("need at least one"));
  EXPECT_THAT(refusal([&] { Loader({a, a}, 16, 1); }), HasSubstr("the name 'a' twice"));
  EXPECT_THAT(refusal([&] { Loader({a}, 16, 1).next(0); }), HasSubstr("rows: got 0"));
  auto missing = a;
  missing.path = (root_ / "nowhere").string();
  EXPECT_THAT(refusal([&] { Loader({missing}, 16, 1); }), HasSubstr("nowhere"));
  auto weightless = a;
  weightless.weight = 0.0;
  EXPECT_THAT(refusal([&] { Loader({weightless}, 16, 1); }), HasSubstr("weight above 0"));
}

TEST_F(LoaderTest, RefusesStatesThatDoNotFit) {
  const auto a = source("a", {10, 20});
  Loader loader({a}, 16, 1);
  const Json good = loader.state().values;
  const auto restore = [&](const std::string& pointer, const Json& value) {
    Json changed = good;
    changed[Json::json_pointer(pointer)] = value;
    return refusal([&] { loader.restore({changed}); });
  };
  EXPECT_THAT(restore("/seed", 2), HasSubstr("saved under seed 2, got 1"));
  EXPECT_THAT(restore("/draws", "x"), HasSubstr("'draws'"));
  EXPECT_THAT(restore("/sources", 7), HasSubstr("has no 'seed' or no table 'sources'"));
  EXPECT_THAT(restore("/sources/a/tokens", 31), HasSubstr("was saved over 2 documents of 31 tokens"));
  EXPECT_THAT(restore("/sources/a/lanes/0", Json::array({5, 0})), HasSubstr("outside of the data"));
  EXPECT_THAT(restore("/sources/a/lanes/0", Json::array({0, 10})), HasSubstr("outside of the data"));
  EXPECT_THAT(restore("/sources/a/lanes/0", 3), HasSubstr("[document, next token]"));
  EXPECT_THAT(restore("/sources/a/opened", -1), HasSubstr("outside of the data"));
  EXPECT_EQ(restore("/draws", 3), "no error");
}

}  // namespace
}  // namespace furlong
