#include "furlong/base/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace furlong {
namespace {

struct Inner {
  std::string kind = "a";
  std::optional<double> bound;
  template <typename V>
  void fields(V& visit) {
    visit("kind", kind, {.doc = "which", .one_of = {"a", "b"}});
    visit("bound", bound, {.doc = "a bound", .min = -10, .max = 0});
  }
};

struct Outer {
  int64_t hidden_size = 8;
  std::vector<int64_t> layers;
  Inner inner;
  std::vector<Inner> stages;
  template <typename V>
  void fields(V& visit) {
    visit("hidden_size", hidden_size, {.doc = "width", .min = 1, .max = 100});
    visit("layers", layers);
    visit("inner", inner);
    visit("stages", stages);
  }
};

Outer read(const std::string& text, const std::vector<std::string>& sets = {}) {
  ConfigDocument document = ConfigDocument::from_text(text, "test.toml");
  for (const auto& set : sets) document.set(set);
  return read_config<Outer>(document);
}

std::string message_of(const std::string& text, const std::vector<std::string>& sets = {}) {
  try {
    read(text, sets);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), 2);
    return error.what();
  }
  return "";
}

const char* kText =
    "hidden_size = 16\nlayers = [1, 2]\n[inner]\nkind = \"b\"\nbound = -5.0\n[[stages]]\n[[stages]]\nkind = \"b\"\n";

TEST(Config, ReadsEveryMemberType) {
  const Outer config = read(kText);
  EXPECT_EQ(config.hidden_size, 16);
  EXPECT_EQ(config.layers, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(config.inner.kind, "b");
  EXPECT_EQ(*config.inner.bound, -5.0);
  EXPECT_EQ(config.stages.size(), 2u);
}

TEST(Config, PrintedTomlReadsBackEqual) {
  const Outer config = read(kText);
  const std::string text = json_to_toml(config_to_json(config));
  EXPECT_EQ(config_to_json(read(text)), config_to_json(config)) << text;
}

TEST(Config, SetOverridesNestedKeysAndArrayEntries) {
  const Outer config = read(kText, {"hidden_size=32", "stages.1.kind=a", "inner.bound=-1"});
  EXPECT_EQ(config.hidden_size, 32);
  EXPECT_EQ(config.stages[1].kind, "a");
  EXPECT_EQ(*config.inner.bound, -1.0);
}

TEST(Config, NamesTheMisspeltKeyAndTheLikelyOne) {
  EXPECT_EQ(message_of("hiden_size = 4"), "test.toml: unknown key 'hiden_size' (did you mean 'hidden_size'?)");
  EXPECT_THAT(message_of("[inner]\nkindd = 'a'"), testing::HasSubstr("'inner.kindd'"));
}

TEST(Config, RefusesValuesOutOfRangeOrOfTheWrongType) {
  EXPECT_EQ(message_of("hidden_size = 0"), "test.toml: key 'hidden_size' is 0, must be in [1, 100]");
  EXPECT_EQ(message_of("hidden_size = 1.5"), "test.toml: key 'hidden_size' must be an integer, got 1.5");
  EXPECT_EQ(message_of("[inner]\nkind = 'c'"), "test.toml: key 'inner.kind' is 'c', must be one of: a, b");
  EXPECT_NE(message_of("hidden_size = = 3"), "");
  EXPECT_NE(message_of("", {"hidden_size"}), "");
  EXPECT_NE(message_of(kText, {"stages.7.kind=a"}), "");
}

}  // namespace
}  // namespace furlong
