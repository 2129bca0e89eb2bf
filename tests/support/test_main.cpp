// main of the unit tests: LibTorch's generators start every test from a seed that its full name gives, so that a
// failure repeats, in any order and under any filter. FURLONG_TEST_SEED=N draws other numbers; a failed test prints its
// seed.

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

/// FNV-1a: the same on every machine, as std::hash need not be.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

uint64_t chosen_seed() {
  const char* text = std::getenv("FURLONG_TEST_SEED");
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
}

class SeedListener : public testing::EmptyTestEventListener {
  static uint64_t seed_of(const testing::TestInfo& test) {
    return hash_of(std::string(test.test_suite_name()) + "." + test.name()) + chosen_seed();
  }
  void OnTestStart(const testing::TestInfo& test) override { at::manual_seed(seed_of(test)); }
  void OnTestEnd(const testing::TestInfo& test) override {
    if (!test.result()->Failed()) return;
    std::printf("%s.%s: at::manual_seed(%llu), FURLONG_TEST_SEED=%llu\n", test.test_suite_name(), test.name(),
                static_cast<unsigned long long>(seed_of(test)), static_cast<unsigned long long>(chosen_seed()));
  }
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new SeedListener);  // owned by the list
  return RUN_ALL_TESTS();
}
