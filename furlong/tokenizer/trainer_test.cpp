#include "furlong/tokenizer/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/rng.h"
#include "furlong/tokenizer/pretokenize.h"
#include "furlong/tokenizer/tokenizer.h"

namespace furlong {
namespace {

/// The definition, without bookkeeping: recount every pair before every merge.
std::vector<std::string> train_slowly(const std::string& text, size_t num_ranks) {
  std::vector<std::vector<int>> words;
  pretokenize(text, [&](std::string_view piece) {
    words.emplace_back();
    for (const char c : piece) words.back().push_back(static_cast<unsigned char>(c));
  });
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  while (tokens.size() < num_ranks) {
    std::map<std::pair<int, int>, int> counts;
    for (const auto& word : words) {
      for (size_t i = 0; i + 1 < word.size(); ++i) ++counts[{word[i], word[i + 1]}];
    }
    std::pair<int, int> best;
    int best_count = 1;
    for (const auto& [pair, count] : counts) {
      if (count > best_count) std::tie(best, best_count) = std::pair(pair, count);
    }
    if (best_count < 2) break;
    const std::string bytes = tokens[best.first] + tokens[best.second];
    const auto found = std::find(tokens.begin(), tokens.end(), bytes);
    const int id = static_cast<int>(found - tokens.begin());
    if (found == tokens.end()) tokens.push_back(bytes);
    for (auto& word : words) {
      std::vector<int> merged;
      for (size_t i = 0; i < word.size(); ++i) {
        const bool here = i + 1 < word.size() && std::pair(word[i], word[i + 1]) == best;
        merged.push_back(here ? id : word[i]);
        if (here) ++i;
      }
      word = merged;
    }
  }
  return tokens;
}

std::vector<std::string> train(const std::string& text, int64_t num_ranks) {
  TokenizerTrainer trainer;
  trainer.add(text);
  return trainer.train(num_ranks);
}

std::string random_text(uint64_t seed, size_t words, int letters) {
  Rng rng(seed);
  std::string text;
  for (size_t i = 0; i < words; ++i) {
    for (uint64_t length = 1 + rng.below(7); length > 0; --length) text += static_cast<char>('a' + rng.below(letters));
    text += ' ';
  }
  return text;
}

TEST(Trainer, MergesTheMostFrequentPair) {
  const auto tokens = train("abab abab ab", 300);
  EXPECT_EQ(tokens[256], "ab");
  const auto first_difference = train("aaa", 300);
  EXPECT_EQ(first_difference[256], "aa");
}

TEST(Trainer, AgreesWithRecounting) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const std::string text = random_text(seed, 400, 2 + static_cast<int>(seed));
    EXPECT_EQ(train(text, 400), train_slowly(text, 400)) << seed;
  }
}

TEST(Trainer, DoesNotDependOnTheOrderOfDocuments) {
  const std::string a = random_text(1, 300, 5), b = random_text(2, 300, 5);
  TokenizerTrainer forward, backward;
  forward.add(a);
  forward.add(b);
  backward.add(b);
  backward.add(a);
  EXPECT_EQ(forward.train(500), backward.train(500));
}

TEST(Trainer, EveryTokenIsReachedByEncoding) {
  const auto tokens = train(random_text(3, 2000, 6), 600);
  const auto tokenizer = Tokenizer::from_text(rank_file_text(tokens), "trained");
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    if (rank >= 128 && rank < 256) continue;  // no UTF-8 alone
    EXPECT_EQ(tokenizer.encode(tokens[rank]), std::vector<int64_t>{static_cast<int64_t>(rank)});
  }
}

TEST(Trainer, StopsWhereNothingRepeats) {
  EXPECT_EQ(train("", 1000).size(), 256u);
  EXPECT_EQ(train("a", 1000).size(), 256u);
  EXPECT_EQ(train("abcdefg", 1000).size(), 256u);
  EXPECT_EQ(train(std::string("\0\0\0\0\xff\xff\xff", 7), 1000).size(), 257u);  // \0\0, which occurs twice
  EXPECT_THROW(train("abc", 255), UsageError);
}

}  // namespace
}  // namespace furlong
