#include "furlong/tokenizer/trainer.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "furlong/base/error.h"
#include "furlong/tokenizer/base64.h"
#include "furlong/tokenizer/bpe.h"
#include "furlong/tokenizer/pretokenize.h"

namespace furlong {

namespace {

using Pair = uint64_t;  // left << 32 | right, so that pairs order by left, then right
Pair pair_of(uint32_t left, uint32_t right) {
  return Pair{left} << 32 | right;
}

struct Word {
  std::vector<uint32_t> tokens;
  int64_t count = 0;
};

struct PairStatistics {
  int64_t count = 0;
  std::vector<uint32_t> words;  // that hold or held the pair; may repeat
};

struct Candidate {
  int64_t count;
  Pair pair;
  bool operator<(const Candidate& other) const {
    return count != other.count ? count < other.count : pair > other.pair;
  }
};

/// The words of the corpus as token sequences, with pair counts kept up to date under merges. The heap is lazy: a
/// candidate whose count is out of date is put back with the current one.
class Merger {
 public:
  explicit Merger(const std::unordered_map<std::string, int64_t>& counts) {
    words_.reserve(counts.size());
    for (const auto& [text, count] : counts) {
      if (text.size() < 2) continue;
      Word& word = words_.emplace_back();
      word.count = count;
      for (const char c : text) word.tokens.push_back(static_cast<unsigned char>(c));
      const auto index = static_cast<uint32_t>(words_.size() - 1);
      for (size_t i = 0; i + 1 < word.tokens.size(); ++i) count_pair(word.tokens[i], word.tokens[i + 1], index);
    }
    for (const auto& [pair, statistics] : pairs_) queue_.push({statistics.count, pair});
  }

  /// The most frequent pair; count 0 when none is left.
  Candidate pop() {
    while (!queue_.empty()) {
      const Candidate top = queue_.top();
      queue_.pop();
      const auto found = pairs_.find(top.pair);
      const int64_t count = found == pairs_.end() ? 0 : found->second.count;
      if (count == top.count) return top;
      if (count > 0) queue_.push({count, top.pair});
    }
    return {0, 0};
  }

  /// Replaces every occurrence of `pair` by `token`.
  void merge(Pair pair, uint32_t token) {
    std::vector<uint32_t> words = std::move(pairs_[pair].words);
    pairs_.erase(pair);
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    touched_.clear();
    for (const uint32_t index : words) merge_in_word(index, pair, token);
    std::sort(touched_.begin(), touched_.end());
    touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
    for (const Pair grown : touched_) {
      if (const auto found = pairs_.find(grown); found != pairs_.end()) queue_.push({found->second.count, grown});
    }
  }

 private:
  void count_pair(uint32_t left, uint32_t right, uint32_t word) {
    PairStatistics& statistics = pairs_[pair_of(left, right)];
    statistics.count += words_[word].count;
    if (statistics.words.empty() || statistics.words.back() != word) statistics.words.push_back(word);
  }
  void discount_pair(uint32_t left, uint32_t right, uint32_t word) {
    const auto found = pairs_.find(pair_of(left, right));
    if (found != pairs_.end()) found->second.count -= words_[word].count;
  }

  void merge_in_word(uint32_t index, Pair pair, uint32_t token) {
    std::vector<uint32_t>& tokens = words_[index].tokens;
    const auto left = static_cast<uint32_t>(pair >> 32);
    const auto right = static_cast<uint32_t>(pair);
    size_t out = 0;
    for (size_t i = 0; i < tokens.size();) {
      if (i + 1 == tokens.size() || tokens[i] != left || tokens[i + 1] != right) {
        tokens[out++] = tokens[i++];
        continue;
      }
      if (out > 0) {
        discount_pair(tokens[out - 1], left, index);
        count_pair(tokens[out - 1], token, index);
        touched_.push_back(pair_of(tokens[out - 1], token));
      }
      if (i + 2 < tokens.size()) {
        discount_pair(right, tokens[i + 2], index);
        count_pair(token, tokens[i + 2], index);
        touched_.push_back(pair_of(token, tokens[i + 2]));
      }
      tokens[out++] = token;
      i += 2;
    }
    tokens.resize(out);
  }

  std::vector<Word> words_;
  std::unordered_map<Pair, PairStatistics> pairs_;
  std::priority_queue<Candidate> queue_;
  std::vector<Pair> touched_;
};

}  // namespace

void TokenizerTrainer::add(std::string_view text) {
  num_bytes_ += static_cast<int64_t>(text.size());
  std::string key;
  pretokenize(text, [&](std::string_view piece) {
    key.assign(piece);
    ++counts_[key];
  });
}

std::vector<std::string> TokenizerTrainer::train(int64_t num_ranks) const {
  if (num_ranks < 256) {
    throw UsageError("[tokenizer train] ranks: got " + std::to_string(num_ranks) + ", need 256 or more");
  }
  RankTable ranks;
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) {
    tokens.emplace_back(1, static_cast<char>(byte));
    ranks.add(tokens.back());
  }
  Merger merger(counts_);
  while (static_cast<int64_t>(tokens.size()) < num_ranks) {
    const Candidate best = merger.pop();
    if (best.count < 2) break;
    std::string bytes = tokens[best.pair >> 32] + tokens[static_cast<uint32_t>(best.pair)];
    // The same bytes may have become a token by another pair: then this pair merges into that token, as encoding does.
    if (ranks.add(bytes)) tokens.push_back(bytes);
    merger.merge(best.pair, static_cast<uint32_t>(ranks.find(bytes)));
  }
  return tokens;
}

std::string rank_file_text(const std::vector<std::string>& tokens) {
  std::string text;
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    text += base64_encode(tokens[rank]) + " " + std::to_string(rank) + "\n";
  }
  return text;
}

}  // namespace furlong
