// The golden-vector support must be able to fail: every way in which a case can be wrong is refused or recorded.

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>

#include "furlong/base/error.h"
#include "furlong/checkpoint/named_tensors.h"
#include "tests/support/golden.h"

namespace furlong::golden {
namespace {

class GoldenSupportTest : public testing::Test {
 protected:
  GoldenSupportTest()
      : folder_(std::filesystem::path(testing::TempDir()) / ("furlong_golden_support_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
    put(R"({"kind":"k","tolerance":{"values":0.01,"text":"x"},"tensors":{"a":{}}})");
    write_tensors(folder_ / "tensors.safetensors", {{"a", at::ones({2})}});
  }
  ~GoldenSupportTest() override { std::filesystem::remove_all(folder_); }

  void put(const std::string& text) { std::ofstream(folder_ / "case.json") << text; }

  bool close(const at::Tensor& got, const at::Tensor& expected, double tolerance = 0.01) {
    Case golden(folder_);
    golden.expect_close("x", got, expected, tolerance);
    return golden.checks().back().passed;
  }

  std::filesystem::path folder_;
};

TEST_F(GoldenSupportTest, ComparesRelativeToTheLargestExpectedValue) {
  const at::Tensor expected = at::full({2}, 100.0);
  EXPECT_TRUE(close(at::full({2}, 100.9), expected));
  EXPECT_FALSE(close(at::full({2}, 101.1), expected));
  EXPECT_TRUE(close(expected, expected, 0.0));
  EXPECT_FALSE(close(at::full({2}, 100.001), expected, 0.0));
  EXPECT_TRUE(close(at::zeros({2}), at::zeros({2}), 0.0));
  EXPECT_FALSE(close(at::full({2}, 0.1), at::zeros({2})));
  EXPECT_TRUE(close(at::zeros({0}), at::zeros({0})));
}

TEST_F(GoldenSupportTest, FailsOnShapesAndOnValuesThatAreNotFinite) {
  const at::Tensor expected = at::ones({2, 3});
  EXPECT_TRUE(close(at::ones({1, 1, 2, 3}), expected));
  EXPECT_FALSE(close(at::ones({3, 2}), expected));
  EXPECT_FALSE(close(at::Tensor(), expected));
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_FALSE(close(at::full({2, 3}, bad), expected));
    EXPECT_FALSE(close(expected, at::full({2, 3}, bad)));
    EXPECT_TRUE(close(at::full({2, 3}, bad), at::full({2, 3}, bad)));
  }
}

TEST_F(GoldenSupportTest, RefusesDamagedCases) {
  const Case golden(folder_);
  EXPECT_EQ(golden.kind(), "k");
  EXPECT_EQ(golden.tolerance("values"), 0.01);
  EXPECT_THROW(golden.tolerance("gradients"), FormatError);
  EXPECT_THROW(golden.tolerance("text"), FormatError);
  EXPECT_THROW(golden.tensor("b"), FormatError);
  put(R"({"tensors":{"b":{}}})");
  EXPECT_THROW(Case{folder_}, FormatError);  // listed, but not in the file
  put(R"({"tensors":{}})");
  EXPECT_THROW(Case{folder_}.kind(), FormatError);
  put("[]");
  EXPECT_THROW(Case{folder_}, FormatError);
  std::filesystem::remove(folder_ / "tensors.safetensors");
  put(R"({"kind":"k","tensors":{"a":{}}})");
  EXPECT_THROW(Case{folder_}, IoError);
  put(R"({"kind":"k"})");  // files alone
  EXPECT_TRUE(Case{folder_}.names().empty());
}

}  // namespace
}  // namespace furlong::golden
