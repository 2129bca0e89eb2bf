#include "furlong/checkpoint/named_tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/checkpoint/checksum.h"
#include "furlong/checkpoint/safetensors.h"

namespace furlong {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

class NamedTensorsTest : public testing::Test {
 protected:
  NamedTensorsTest() : folder_(fs::path(testing::TempDir()) / ("furlong_named_tensors_" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
    path_ = folder_ / "model.safetensors";
  }
  ~NamedTensorsTest() override { fs::remove_all(folder_); }

  void put_index(const std::string& text) { std::ofstream(folder_ / "model.safetensors.index.json") << text; }

  std::string refusal() {
    try {
      const CheckpointReader reader(folder_);
      for (const std::string& name : reader.names()) reader.tensor(name);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }

  fs::path folder_;
  fs::path path_;
};

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

TEST_F(NamedTensorsTest, KeepsEveryDtypeToTheBit) {
  NamedTensors tensors;
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                                    at::kChar, at::kByte, at::kBool, at::kUInt16, at::kUInt32, at::kUInt64,
                                    at::kComplexFloat, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e8m0fnu}) {
    at::Tensor tensor = at::empty({3, 5}, at::TensorOptions(type));
    auto* bytes = static_cast<uint8_t*>(tensor.mutable_data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i) bytes[i] = type == at::kBool ? i % 2 : 37 * i + 11;
    tensors.emplace_back(c10::toString(type), tensor);
  }
  tensors.emplace_back("scalar", at::full({}, 2.5));
  tensors.emplace_back("empty", at::zeros({4, 0, 2}));
  write_tensors(path_, tensors, {{"step", "12"}});
  const CheckpointReader reader(path_);
  EXPECT_EQ(reader.names().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(same_bytes(reader.tensor(name), tensor)) << name;
  EXPECT_EQ(reader.metadata().at("step"), "12");
  EXPECT_EQ(reader.dtype("BFloat16"), "BF16");
  EXPECT_THAT(reader.shape("empty"), ElementsAre(4, 0, 2));
}

TEST_F(NamedTensorsTest, WritesViewsAsTheyRead) {
  const at::Tensor view = at::arange(12, at::kFloat).view({3, 4}).t().requires_grad_(true);
  write_tensors(path_, {{"view", view}});
  EXPECT_TRUE(CheckpointReader(path_).tensor("view").equal(view));
}

TEST_F(NamedTensorsTest, NamesMissingTensors) {
  write_tensors(path_, {{"a", at::zeros({1})}});
  const CheckpointReader reader(path_);
  EXPECT_TRUE(reader.contains("a"));
  EXPECT_FALSE(reader.contains("b"));
  EXPECT_THROW(reader.tensor("b"), FormatError);
  EXPECT_THROW(reader.shape("b"), FormatError);
  EXPECT_THROW(write_tensors(path_, {{"undefined", at::Tensor()}}), UsageError);
}

// Whatever bit of the file is flipped, its content comes out as it was or not at all; only the checksum's own key can
// be damaged into something else, which leaves a file without a checksum.
TEST_F(NamedTensorsTest, DetectsEveryFlippedBit) {
  const at::Tensor a = at::arange(2, at::kFloat);
  const at::Tensor b = at::arange(1, at::kBFloat16);
  write_tensors(path_, {{"a", a}, {"b", b}}, {{"step", "1"}});
  std::string bytes = read_file(path_);
  const size_t key = bytes.find("furlong.checksum");
  size_t accepted = 0;
  const size_t data_start = bytes.size() - a.nbytes() - b.nbytes();
  // Every bit of the data; of the header, whose parser has a test of its own, one bit in each byte, another each time.
  for (size_t bit = 0; bit < bytes.size() * 8; bit += bit < data_start * 8 ? 9 : 1) {
    if (bit / 8 >= key && bit / 8 < key + 16) continue;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    std::ofstream(path_, std::ios::binary) << bytes;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    try {
      const CheckpointReader reader(path_);
      EXPECT_TRUE(same_bytes(reader.tensor("a"), a)) << bit;
      EXPECT_TRUE(same_bytes(reader.tensor("b"), b)) << bit;
      EXPECT_EQ(reader.metadata().at("step"), "1") << bit;
      ++accepted;
    } catch (const FormatError&) {
    }
  }
  EXPECT_LT(accepted, 40u);  // padding spaces that became other white space
}

TEST_F(NamedTensorsTest, ReadsShards) {
  write_tensors(folder_ / "one.safetensors", {{"a", at::full({2}, 1.0)}});
  write_tensors(folder_ / "two.safetensors", {{"b", at::full({2}, 2.0)}, {"c", at::full({2}, 3.0)}});
  put_index(R"({"metadata":{"total_size":24},
                "weight_map":{"a":"one.safetensors","b":"two.safetensors","c":"two.safetensors"}})");
  const CheckpointReader reader(folder_);
  EXPECT_THAT(reader.names(), ElementsAre("a", "b", "c"));
  EXPECT_EQ(reader.tensor("c")[0].item<double>(), 3.0);
  EXPECT_TRUE(CheckpointReader(folder_ / "model.safetensors.index.json").contains("b"));
}

TEST_F(NamedTensorsTest, HonoursTheIndexExactly) {
  write_tensors(folder_ / "one.safetensors", {{"a", at::zeros({2})}});
  write_tensors(folder_ / "two.safetensors", {{"b", at::zeros({2})}});
  const struct {
    const char* index;
    const char* fault;
  } cases[] = {
      {R"({"weight_map":{"a":"one.safetensors","b":"three.safetensors"}})", "missing: three.safetensors"},
      {R"({"weight_map":{"a":"two.safetensors","b":"one.safetensors"}})", "says that it is in"},
      {R"({"weight_map":{"c":"one.safetensors","b":"two.safetensors"}})", "tensor 'a': model.safetensors.index.json"},
      {R"({"weight_map":{"a":"one.safetensors","x":"one.safetensors"}})", "tensor 'x' is missing"},
      {R"({"weight_map":{"a":"../one.safetensors"}})", "without a folder"},
      {R"({"weight_map":{"a":"/one.safetensors"}})", "without a folder"},
      {R"({"weight_map":{"a":".."}})", "without a folder"},
      {R"({"weight_map":{"a":"one.safetensors","a":"two.safetensors"}})", "'a' stands twice"},
      {R"({"weight_map":{"a":1}})", "tensor 'a'"},
      {R"({"weight_map":{}})", "empty"},
      {R"({"weight_map":[]})", "needs an object"},
      {R"({})", "needs an object"},
      {R"([])", "needs an object"},
      {R"({"weight_map":)", "not valid JSON"},
      {R"({"metadata":[[[[[[[1]]]]]]]})", "nested too deeply"},
  };
  for (const auto& [index, fault] : cases) {
    put_index(index);
    EXPECT_THAT(refusal(), HasSubstr(fault)) << index;
  }
}

TEST_F(NamedTensorsTest, RefusesAFolderThatIsNotClear) {
  EXPECT_THAT(refusal(), HasSubstr("holds neither"));
  write_tensors(path_, {{"a", at::zeros({2})}});
  EXPECT_EQ(refusal(), "accepted");
  put_index(R"({"weight_map":{"a":"model.safetensors"}})");
  EXPECT_THAT(refusal(), HasSubstr("holds both"));
}

TEST(Checksum, SeesPositionLengthAndTopBits) {
  std::vector<uint64_t> words(4096, 0);
  const uint64_t zeros = checksum64(std::as_bytes(std::span(words)));
  EXPECT_NE(zeros, checksum64(std::as_bytes(std::span(words).first(4095))));
  // Two top bits of one lane: plain word-wise FNV-1a would let them cancel.
  words[0] ^= uint64_t{1} << 63;
  words[8] ^= uint64_t{1} << 63;
  EXPECT_NE(zeros, checksum64(std::as_bytes(std::span(words))));
  std::swap(words[8], words[9]);
  const uint64_t moved = checksum64(std::as_bytes(std::span(words)));
  std::swap(words[9], words[17]);
  EXPECT_NE(moved, checksum64(std::as_bytes(std::span(words))));
  EXPECT_EQ(checksum_text(0x0123456789abcdefu), "0123456789abcdef");
}

TEST(Checksum, IsTheSameForAnyNumberOfThreads) {
  std::vector<uint64_t> words(3 << 17);
  for (size_t i = 0; i < words.size(); ++i) words[i] = i * i;
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const uint64_t one = checksum64(std::as_bytes(std::span(words)));
  omp_set_num_threads(3);
  EXPECT_EQ(checksum64(std::as_bytes(std::span(words))), one);
  omp_set_num_threads(threads);
  EXPECT_EQ(tensor_checksum(at::zeros({0})), tensor_checksum(at::zeros({0, 3})));
}

// T20: a shard that the index names is gone; all that are gone are listed.
TEST_F(NamedTensorsTest, ListsEveryMissingShard) {
  put_index(R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors","c":"three.safetensors"}})");
  write_tensors(folder_ / "two.safetensors", {{"b", at::zeros({2})}});
  EXPECT_THAT(refusal(), HasSubstr("files that it lists are missing: one.safetensors, three.safetensors"));
}

// T97: offsets beyond 4 GiB, in a sparse file.
TEST_F(NamedTensorsTest, ReadsBehindFourGibibytes) {
  const uint64_t far = 5'000'000'000;
  const std::string header = R"({"big":{"dtype":"U8","shape":[5000000000],"data_offsets":[0,5000000000]},)"
                             R"("end":{"dtype":"I32","shape":[1],"data_offsets":[5000000000,5000000004]}})";
  std::ofstream file(path_, std::ios::binary);
  const uint64_t header_bytes = header.size();
  file.write(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes));
  file << header;
  file.seekp(static_cast<std::streamoff>(sizeof(header_bytes) + header_bytes + far));
  const int32_t value = 1234567;
  file.write(reinterpret_cast<const char*>(&value), sizeof(value));
  file.close();
  const CheckpointReader reader(folder_);
  EXPECT_EQ(reader.tensor("end").item<int32_t>(), value);
  EXPECT_EQ(reader.byte_size("big"), far);
}

TEST_F(NamedTensorsTest, WritesAFileLaidOutAsAnother) {
  // Another writer: keys out of order, blanks in the header, no checksum.
  const std::string header = R"({ "b":{"shape":[2],"data_offsets":[4,8],"dtype":"BF16"},)"
                             R"( "a":{"dtype":"F32","data_offsets":[0,4],"shape":[1]} }   )";
  std::string text(8, '\0');
  text[0] = static_cast<char>(header.size());
  text += header + std::string("\0\0\x80\x3f\x80\x3f\0\x40", 8);
  write_file_atomic(path_, text);
  const fs::path again = folder_ / "again.safetensors";
  write_tensors_like(path_, again, [](const std::string&) { return at::Tensor(); });
  EXPECT_EQ(read_file(again), text);
  const CheckpointReader reader(path_);
  write_tensors_like(path_, again, [&](const std::string& name) { return reader.tensor(name).to(at::kFloat); });
  EXPECT_EQ(read_file(again), text);
  EXPECT_THROW(write_tensors_like(path_, again, [](const std::string&) { return at::zeros({3}); }), UsageError);
}

}  // namespace
}  // namespace furlong
