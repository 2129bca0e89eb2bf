#include "furlong/checkpoint/safetensors.h"

#include <gtest/gtest.h>

namespace furlong {
namespace {

TEST(Safetensors, RoundTrips) {
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "furlong_safetensors_test";
  const std::vector<float> values = {1, 2, 3};
  write_safetensors(path, {{"a", "F32", {3}, std::as_bytes(std::span(values))}, {"e", "F32", {0}, {}}}, {{"k", "v"}});
  const SafetensorsFile file(path);
  EXPECT_EQ(file.metadata().at("k"), "v");
  EXPECT_EQ(file.tensors().at("a").bytes, 12u);
  EXPECT_EQ(file.tensors().at("e").bytes, 0u);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace furlong
