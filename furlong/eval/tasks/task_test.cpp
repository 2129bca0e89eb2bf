#include "furlong/eval/tasks/task.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "furlong/base/error.h"
#include "furlong/base/sha256.h"

namespace furlong::eval {
namespace {

template <typename Visit>
void for_each_question(const TaskItem& item, const Visit& visit) {
  for (size_t t = 0; t < item.tokens.size(); ++t) {
    if (item.targets[t] != kNoTarget) visit(t, item.targets[t]);
  }
}

std::string digest(const Task& task, uint64_t seed) {
  std::string text;
  for (uint64_t index = 0; index < 16; ++index) {
    const TaskItem item = task.item(seed, index);
    for (const int64_t token : item.tokens) text += std::to_string(token) + " ";
    for (const int64_t target : item.targets) text += std::to_string(target) + " ";
    text += "\n";
  }
  return sha256_hex(text).substr(0, 16);
}

TEST(Tasks, OracleScoresOneAndItemsAreInRange) {
  for (const std::string& name : tiny_task_names()) {
    const auto task = make_tiny_task(name);
    for (uint64_t index = 0; index < 500; ++index) {
      const TaskItem item = task->item(7, index);
      ASSERT_EQ(static_cast<int64_t>(item.tokens.size()), task->length()) << name;
      ASSERT_EQ(item.targets.size(), item.tokens.size()) << name;
      for (const int64_t token : item.tokens) ASSERT_TRUE(token >= 0 && token < task->vocab_size()) << name;
      for_each_question(item,
                        [&](size_t t, int64_t target) { ASSERT_EQ(task->oracle(item.tokens, t), target) << name; });
    }
  }
}

TEST(Tasks, ShortcutScoresWhatIsStated) {
  for (const std::string& name : tiny_task_names()) {
    const auto task = make_tiny_task(name);
    double right = 0, questions = 0;
    for (uint64_t index = 0; index < 4000; ++index) {
      const TaskItem item = task->item(11, index);
      for_each_question(item, [&](size_t t, int64_t target) {
        right += task->shortcut_answer(item.tokens, t) == target ? 1 : 0;
        ++questions;
      });
    }
    EXPECT_NEAR(right / questions, task->shortcut(), 0.02) << name;
    EXPECT_GE(task->shortcut(), task->chance()) << name;
  }
}

TEST(Tasks, MqarAsksEveryKeyOnceOfDistinctKeysAndValues) {
  const auto task = make_tiny_task("mqar");
  for (uint64_t index = 0; index < 100; ++index) {
    const TaskItem item = task->item(3, index);
    std::set<int64_t> keys, values, asked;
    for (size_t i = 0; i < 16; i += 2) {
      keys.insert(item.tokens[i]);
      values.insert(item.tokens[i + 1]);
      EXPECT_LT(item.tokens[i], 64);
      EXPECT_GE(item.tokens[i + 1], 64);
    }
    for_each_question(item, [&](size_t t, int64_t) { asked.insert(item.tokens[t]); });
    EXPECT_EQ(keys.size(), 8u);
    EXPECT_EQ(values.size(), 8u);
    EXPECT_EQ(asked, keys);
  }
}

TEST(Tasks, ItemsArePinned) {
  const std::map<std::string, std::vector<std::string>> pinned = {
      {"mqar", {"44fa732d259a56ef", "badaac2db8d4ae4d", "67ae506ee1466cb7"}},
      {"palin", {"0b96149dfbb87e67", "097d1652887f1123", "add2138b2a9f5afe"}},
      {"stack", {"704007b89c5ca3cd", "361be037112b893d", "7eb10b54f13985c6"}},
  };
  for (const auto& [name, digests] : pinned) {
    for (uint64_t seed = 0; seed < 3; ++seed) EXPECT_EQ(digest(*make_tiny_task(name), seed), digests[seed]) << name;
  }
}

TEST(Tasks, RefusesImpossibleSizes) {
  EXPECT_THROW(make_mqar(64, 40, 128), UsageError);
  EXPECT_THROW(make_mqar(64, 8, 8), UsageError);
  EXPECT_THROW(make_palindrome(64, 32), UsageError);
  EXPECT_THROW(make_stack(95, 4, 32), UsageError);
  EXPECT_THROW(make_tiny_task("mqra"), UsageError);
}

}  // namespace
}  // namespace furlong::eval
