#include <algorithm>
#include <cmath>

#include "furlong/base/error.h"
#include "furlong/base/rng.h"
#include "furlong/eval/tasks/task.h"

namespace furlong::eval {
namespace {

constexpr double kGapExponent = 0.01;  // weight of gap g: a g^(a - 1)

/// `count` different numbers below `bound`, in random order.
std::vector<int64_t> draw_distinct(Rng& rng, int64_t count, int64_t bound) {
  std::vector<int64_t> numbers(static_cast<size_t>(bound));
  for (int64_t i = 0; i < bound; ++i) numbers[static_cast<size_t>(i)] = i;
  for (int64_t i = 0; i < count; ++i) {
    const auto other = i + static_cast<int64_t>(rng.below(static_cast<uint64_t>(bound - i)));
    std::swap(numbers[static_cast<size_t>(i)], numbers[static_cast<size_t>(other)]);
  }
  numbers.resize(static_cast<size_t>(count));
  return numbers;
}

/// `count` different slots below `slots`, without replacement, by the power law.
std::vector<int64_t> draw_gaps(Rng& rng, int64_t count, int64_t slots) {
  std::vector<double> weight(static_cast<size_t>(slots));
  double total = 0;
  for (int64_t g = 0; g < slots; ++g) {
    weight[static_cast<size_t>(g)] = kGapExponent * std::pow(static_cast<double>(g + 1), kGapExponent - 1);
    total += weight[static_cast<size_t>(g)];
  }
  std::vector<int64_t> gaps;
  while (static_cast<int64_t>(gaps.size()) < count) {
    double rest = rng.uniform() * total;
    size_t pick = 0;
    while (pick + 1 < weight.size() && (weight[pick] == 0 || rest >= weight[pick])) rest -= weight[pick++];
    if (weight[pick] == 0) continue;  // rounding carried the draw past the last free slot
    total -= weight[pick];
    weight[pick] = 0;
    gaps.push_back(static_cast<int64_t>(pick));
  }
  return gaps;
}

class Mqar final : public Task {
 public:
  Mqar(int64_t length, int64_t pairs, int64_t vocab_size) : length_(length), pairs_(pairs), vocab_size_(vocab_size) {
    if (pairs < 1 || vocab_size < 2 * pairs || length < 4 * pairs) {
      throw UsageError("[mqar] got length " + std::to_string(length) + ", pairs " + std::to_string(pairs) +
                       ", vocabulary " + std::to_string(vocab_size) +
                       "; need a length of 4 and a vocabulary of 2 for each pair");
    }
  }

  std::string name() const override { return "mqar"; }
  int64_t vocab_size() const override { return vocab_size_; }
  int64_t length() const override { return length_; }
  double chance() const override { return 2.0 / static_cast<double>(vocab_size_); }
  double shortcut() const override { return 1.0 / static_cast<double>(pairs_); }

  TaskItem item(uint64_t seed, uint64_t index) const override {
    Rng rng(seed, index);
    const int64_t half = vocab_size_ / 2;
    const std::vector<int64_t> keys = draw_distinct(rng, pairs_, half);
    const std::vector<int64_t> values = draw_distinct(rng, pairs_, vocab_size_ - half);
    TaskItem item;
    for (size_t i = 0; i < keys.size(); ++i) {
      item.tokens.push_back(keys[i]);
      item.tokens.push_back(half + values[i]);
    }
    while (static_cast<int64_t>(item.tokens.size()) < length_) {
      item.tokens.push_back(static_cast<int64_t>(rng.below(static_cast<uint64_t>(vocab_size_))));
    }
    item.targets.assign(item.tokens.size(), kNoTarget);
    const std::vector<int64_t> gaps = draw_gaps(rng, pairs_, (length_ - 2 * pairs_) / 2);
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto place = static_cast<size_t>(2 * pairs_ + 2 * gaps[i]);
      item.tokens[place] = keys[i];
      item.targets[place] = half + values[i];
    }
    return item;
  }

  int64_t oracle(const std::vector<int64_t>& tokens, size_t place) const override {
    for (size_t i = 0; i < static_cast<size_t>(2 * pairs_); i += 2) {
      if (tokens[i] == tokens[place]) return tokens[i + 1];
    }
    return kNoTarget;
  }
  /// Any value that was shown: right once in `pairs` queries.
  int64_t shortcut_answer(const std::vector<int64_t>& tokens, size_t) const override { return tokens[1]; }

 private:
  int64_t length_, pairs_, vocab_size_;
};

}  // namespace

std::unique_ptr<Task> make_mqar(int64_t length, int64_t pairs, int64_t vocab_size) {
  return std::make_unique<Mqar>(length, pairs, vocab_size);
}

}  // namespace furlong::eval
