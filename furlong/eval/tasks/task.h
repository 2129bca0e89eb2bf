#pragma once

// Synthetic tasks: what a sequence mixer must be able to do, small enough to learn in seconds. A task makes items from
// (seed, index) alone, knows the right answers from an item's tokens alone (the oracle), and states what guessing
// scores: uniformly (chance) and by a rule that needs no memory of the right kind (shortcut).

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace furlong::eval {

constexpr int64_t kNoTarget = -1;

struct TaskItem {
  std::vector<int64_t> tokens;   // one symbol each, 0 .. vocab_size() - 1
  std::vector<int64_t> targets;  // what must follow tokens[t], or kNoTarget where nothing is asked
};

class Task {
 public:
  virtual ~Task() = default;

  virtual std::string name() const = 0;
  virtual int64_t vocab_size() const = 0;
  virtual int64_t length() const = 0;
  /// Deterministic; items of different (seed, index) are independent.
  virtual TaskItem item(uint64_t seed, uint64_t index) const = 0;

  /// The right answer after tokens[place], worked out from the tokens before it.
  virtual int64_t oracle(const std::vector<int64_t>& tokens, size_t place) const = 0;
  /// An answer by the cheapest rule that beats or equals chance.
  virtual int64_t shortcut_answer(const std::vector<int64_t>& tokens, size_t place) const = 0;
  /// Expected accuracy of a uniform guess, and of the shortcut.
  virtual double chance() const = 0;
  virtual double shortcut() const = 0;
};

/// Multi-query associative recall (zoology): `pairs` distinct keys, each followed by its value; later every key comes
/// once more and its value is asked. Keys from the lower half of the vocabulary, values from the upper half, gaps of
/// the queries by a power law (exponent 0.01 - 1), the rest random symbols.
std::unique_ptr<Task> make_mqar(int64_t length, int64_t pairs, int64_t vocab_size);

/// Random symbols, a separator (symbol 0), the same symbols in reverse. `length` is odd.
std::unique_ptr<Task> make_palindrome(int64_t length, int64_t vocab_size);

/// `stacks` last-in-first-out stacks: "push, stack, symbol" and "pop, stack", after which the symbol is asked.
std::unique_ptr<Task> make_stack(int64_t length, int64_t stacks, int64_t num_symbols);

/// The sizes of continuous integration: "mqar" (64 tokens, 8 pairs, 128 symbols), "palin" (63 tokens, 32 symbols),
/// "stack" (96 tokens, 4 stacks, 32 symbols). UsageError naming an unknown one.
std::unique_ptr<Task> make_tiny_task(const std::string& name);
std::vector<std::string> tiny_task_names();

}  // namespace furlong::eval
