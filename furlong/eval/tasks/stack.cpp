#include "furlong/base/error.h"
#include "furlong/base/rng.h"
#include "furlong/eval/tasks/task.h"

namespace furlong::eval {
namespace {

constexpr int64_t kPush = 0, kPop = 1, kFirstStack = 2;
constexpr int64_t kOperationLength = 3;  // push, stack, symbol | pop, stack, symbol

class Stack final : public Task {
 public:
  Stack(int64_t length, int64_t stacks, int64_t num_symbols)
      : length_(length), stacks_(stacks), num_symbols_(num_symbols) {
    if (stacks < 1 || num_symbols < 2 || length < 2 * kOperationLength || length % kOperationLength != 0) {
      throw UsageError("[stack] got length " + std::to_string(length) + ", stacks " + std::to_string(stacks) +
                       ", symbols " + std::to_string(num_symbols) +
                       "; need a multiple of 3 from 6, a stack and two symbols");
    }
  }

  std::string name() const override { return "stack"; }
  int64_t vocab_size() const override { return kFirstStack + stacks_ + num_symbols_; }
  int64_t length() const override { return length_; }
  double chance() const override { return 1.0 / static_cast<double>(num_symbols_); }
  /// Measured over 4,000 items of 96 tokens on 4 stacks: stacks are often empty, so the last push is often the answer.
  double shortcut() const override { return 0.486; }

  /// Push and pop come equally often where a pop is possible; the stack of a pop is any that holds something.
  TaskItem item(uint64_t seed, uint64_t index) const override {
    Rng rng(seed, index);
    std::vector<std::vector<int64_t>> contents(static_cast<size_t>(stacks_));
    TaskItem item;
    for (int64_t done = 0; done < length_; done += kOperationLength) {
      std::vector<int64_t> filled;
      for (int64_t s = 0; s < stacks_; ++s) {
        if (!contents[static_cast<size_t>(s)].empty()) filled.push_back(s);
      }
      const bool pop = rng.below(2) == 1 && !filled.empty();
      const int64_t stack =
          pop ? filled[rng.below(filled.size())] : static_cast<int64_t>(rng.below(static_cast<uint64_t>(stacks_)));
      auto& content = contents[static_cast<size_t>(stack)];
      if (!pop)
        content.push_back(kFirstStack + stacks_ + static_cast<int64_t>(rng.below(static_cast<uint64_t>(num_symbols_))));
      const int64_t symbol = content.back();
      if (pop) content.pop_back();
      item.tokens.insert(item.tokens.end(), {pop ? kPop : kPush, kFirstStack + stack, symbol});
      item.targets.insert(item.targets.end(), {kNoTarget, pop ? symbol : kNoTarget, kNoTarget});
    }
    return item;
  }

  int64_t oracle(const std::vector<int64_t>& tokens, size_t place) const override {
    std::vector<int64_t> content;
    for (size_t t = 0; t + 2 <= place; t += kOperationLength) {
      if (tokens[t + 1] != tokens[place]) continue;
      if (tokens[t] == kPush) {
        content.push_back(tokens[t + 2]);
      } else {
        content.pop_back();
      }
    }
    return content.back();
  }
  /// What was pushed last, onto whichever stack.
  int64_t shortcut_answer(const std::vector<int64_t>& tokens, size_t place) const override {
    for (size_t t = place - 1; t >= kOperationLength; t -= kOperationLength) {
      if (tokens[t - kOperationLength] == kPush) return tokens[t - 1];
    }
    return kFirstStack + stacks_;
  }

 private:
  int64_t length_, stacks_, num_symbols_;
};

}  // namespace

std::unique_ptr<Task> make_stack(int64_t length, int64_t stacks, int64_t num_symbols) {
  return std::make_unique<Stack>(length, stacks, num_symbols);
}

}  // namespace furlong::eval
