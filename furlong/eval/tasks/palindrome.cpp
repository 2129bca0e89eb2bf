#include "furlong/base/error.h"
#include "furlong/base/rng.h"
#include "furlong/eval/tasks/task.h"

namespace furlong::eval {
namespace {

constexpr int64_t kSeparator = 0;

class Palindrome final : public Task {
 public:
  Palindrome(int64_t length, int64_t vocab_size) : length_(length), vocab_size_(vocab_size) {
    if (length < 3 || length % 2 == 0 || vocab_size < 2) {
      throw UsageError("[palin] got length " + std::to_string(length) + ", vocabulary " + std::to_string(vocab_size) +
                       "; need an odd length from 3 and a vocabulary from 2");
    }
  }

  std::string name() const override { return "palin"; }
  int64_t vocab_size() const override { return vocab_size_; }
  int64_t length() const override { return length_; }
  double chance() const override { return 1.0 / static_cast<double>(vocab_size_ - 1); }
  /// A symbol of the first half is right at its own place, and by chance elsewhere.
  double shortcut() const override {
    const double place = 2.0 / static_cast<double>(length_ - 1);
    return place + (1 - place) * chance();
  }

  TaskItem item(uint64_t seed, uint64_t index) const override {
    Rng rng(seed, index);
    const int64_t half = (length_ - 1) / 2;
    TaskItem item;
    for (int64_t i = 0; i < half; ++i) {
      item.tokens.push_back(1 + static_cast<int64_t>(rng.below(static_cast<uint64_t>(vocab_size_ - 1))));
    }
    item.tokens.push_back(kSeparator);
    for (int64_t i = half - 1; i >= 0; --i) item.tokens.push_back(item.tokens[static_cast<size_t>(i)]);
    item.targets.assign(item.tokens.size(), kNoTarget);
    for (auto t = static_cast<size_t>(half); t + 1 < item.tokens.size(); ++t) item.targets[t] = item.tokens[t + 1];
    return item;
  }

  int64_t oracle(const std::vector<int64_t>& tokens, size_t place) const override {
    const auto half = static_cast<size_t>((length_ - 1) / 2);
    return tokens[half - 1 - (place - half)];
  }
  /// A symbol of the first half, whatever the place.
  int64_t shortcut_answer(const std::vector<int64_t>& tokens, size_t) const override { return tokens[1]; }

 private:
  int64_t length_, vocab_size_;
};

}  // namespace

std::unique_ptr<Task> make_palindrome(int64_t length, int64_t vocab_size) {
  return std::make_unique<Palindrome>(length, vocab_size);
}

}  // namespace furlong::eval
