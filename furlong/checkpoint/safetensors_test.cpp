#include "furlong/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <string_view>

#include "furlong/base/error.h"
#include "furlong/base/rng.h"
#include "furlong/checkpoint/safetensors_header.h"

namespace furlong {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class SafetensorsTest : public testing::Test {
 protected:
  SafetensorsTest() : folder_(fs::path(testing::TempDir()) / ("furlong_safetensors_" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
    path_ = folder_ / "x.safetensors";
  }
  ~SafetensorsTest() override { fs::remove_all(folder_); }

  void put(std::string_view bytes) { std::ofstream(path_, std::ios::binary) << bytes; }

  /// A file of this header and `data_bytes` zeros.
  void put_header(const std::string& header, size_t data_bytes) {
    const uint64_t length = header.size();
    put(std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header + std::string(data_bytes, '\0'));
  }

  std::string refusal() {
    try {
      const SafetensorsFile file(path_);
    } catch (const FormatError& error) {
      return error.what();
    }
    return "accepted";
  }

  std::string refusal_of(const std::string& header, size_t data_bytes) {
    put_header(header, data_bytes);
    return refusal();
  }

  fs::path folder_;
  fs::path path_;
};

std::string small_file(const fs::path& path) {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  const std::vector<uint16_t> halves = {7, 8};
  write_safetensors(path,
                    {{"weight", "F32", {2, 3}, std::as_bytes(std::span(values))},
                     {"empty", "I64", {0, 4}, {}},
                     {"bias", "BF16", {2}, std::as_bytes(std::span(halves))},
                     {"scalar", "F32", {}, std::as_bytes(std::span(values).first(1))}},
                    {{"format", "pt"}});
  return read_file(path);
}

std::string header_of(const std::string& file) {
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  return file.substr(sizeof(length), length);
}

/// What is accepted must lie inside the data; a furlong::Error is an answer too, anything else is a fault.
void parse_or_refuse(const std::string& header, uint64_t data_bytes) {
  try {
    for (const auto& [name, entry] : parse_safetensors_header(header, data_bytes, "x").tensors) {
      ASSERT_LE(entry.offset, data_bytes) << header;
      ASSERT_LE(entry.bytes, data_bytes - entry.offset) << header;
    }
  } catch (const FormatError&) {
  }
}

TEST_F(SafetensorsTest, WritesWhatItReads) {
  small_file(path_);
  const SafetensorsFile file(path_);
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
  ASSERT_EQ(file.tensors().size(), 4u);
  const TensorEntry& weight = file.tensors().at("weight");
  EXPECT_EQ(weight.dtype, "F32");
  EXPECT_EQ(weight.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(weight.offset % 8, 0u);
  float values[6];
  std::memcpy(values, file.data(weight).data(), sizeof(values));
  EXPECT_EQ(values[5], 6.0f);
  EXPECT_EQ(file.data(file.tensors().at("empty")).size(), 0u);
  EXPECT_TRUE(file.tensors().at("scalar").shape.empty());
}

TEST_F(SafetensorsTest, ReadsFilesOfOtherWriters) {
  // No metadata, no padding (so data stand at an odd address), keys in another order, space after the header.
  put_header(R"({"t":{"shape":[1],"data_offsets":[0,2],"dtype":"F16"} }  )", 2);
  EXPECT_EQ(SafetensorsFile(path_).tensors().at("t").bytes, 2u);
  put_header("{}", 0);
  EXPECT_TRUE(SafetensorsFile(path_).tensors().empty());
}

TEST_F(SafetensorsTest, RefusesEveryTruncation) {
  const std::string whole = small_file(path_);
  for (size_t size = 0; size < whole.size(); ++size) {
    put(std::string_view(whole).substr(0, size));
    EXPECT_NE(refusal(), "accepted") << size;
  }
  put(whole + '\0');
  EXPECT_THAT(refusal(), HasSubstr("1 bytes at the end belong to no tensor"));
}

TEST_F(SafetensorsTest, SurvivesEveryFlippedBitOfTheHeader) {
  const std::string whole = small_file(path_);
  std::string header = header_of(whole);
  const size_t data_bytes = whole.size() - sizeof(uint64_t) - header.size();
  for (size_t bit = 0; bit < header.size() * 8; ++bit) {
    header[bit / 8] = static_cast<char>(header[bit / 8] ^ (1 << bit % 8));
    parse_or_refuse(header, data_bytes);
    header[bit / 8] = static_cast<char>(header[bit / 8] ^ (1 << bit % 8));
  }
}

TEST_F(SafetensorsTest, RefusesEveryFlippedBitOfTheLength) {
  const std::string whole = small_file(path_);
  for (size_t bit = 0; bit < 64; ++bit) {
    std::string bytes = whole;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    put(bytes);
    EXPECT_NE(refusal(), "accepted") << bit;
  }
}

// Headers cut up and put together again: a cheap stand-in for a fuzzer's corpus, the same in every run.
TEST_F(SafetensorsTest, SurvivesScrambledHeaders) {
  const std::string whole = small_file(path_);
  const std::string header = header_of(whole);
  const size_t data_bytes = whole.size() - sizeof(uint64_t) - header.size();
  Rng rng(1);
  for (int round = 0; round < 20'000; ++round) {
    std::string scrambled = header;
    for (uint64_t edits = 1 + rng.below(4); edits > 0; --edits) {
      const std::string piece = scrambled.substr(rng.below(scrambled.size()), rng.below(12));
      const size_t to = rng.below(scrambled.size());
      if (rng.below(2) == 0) {
        scrambled.insert(to, piece);
      } else {
        scrambled.replace(to, piece.size(), std::string(rng.below(3), "{}[]\",:0129-"[rng.below(12)]));
      }
    }
    parse_or_refuse(scrambled, data_bytes);
  }
}

TEST_F(SafetensorsTest, RefusesHeadersLargerThanTheFile) {
  for (const uint64_t length : {uint64_t{3}, uint64_t{1} << 32, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    put(std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + "{}");
    EXPECT_THAT(refusal(), HasSubstr("the header claims")) << length;
  }
}

TEST_F(SafetensorsTest, NamesTheFaultOfAHeader) {
  const auto tensor = [](const std::string& fields) { return R"({"t":{)" + fields + "}}"; };
  const std::string good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  const struct {
    std::string header;
    size_t data_bytes;
    const char* fault;
  } cases[] = {
      {"[]", 0, "got a list"},
      {"3", 0, "got a number"},
      {"", 0, "not valid JSON"},
      {"{} {}", 0, "not valid JSON"},
      {R"({"t":3})", 0, "tensor 't': got a number, need an object"},
      {R"({"t":{)" + good + R"(},"t":{)" + good + "}}", 8, "tensor 't': stands twice"},
      {tensor(good + R"(,"dtype":"F32")"), 8, "key 'dtype' stands twice"},
      {tensor(good + R"(,"more":1)"), 8, "unknown key 'more'"},
      {tensor(R"("dtype":"F32","shape":[2])"), 8, "needs dtype, shape and data_offsets"},
      {tensor(R"("dtype":"F33","shape":[2],"data_offsets":[0,8])"), 8, "unknown dtype 'F33'"},
      {tensor(R"("dtype":7,"shape":[2],"data_offsets":[0,8])"), 8, "dtype: got a number"},
      {tensor(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), 8, "shape: got a negative number"},
      {tensor(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), 8, "not a 64-bit integer"},
      {tensor(R"("dtype":"F32","shape":[[2]],"data_offsets":[0,8])"), 8, "shape: got a list"},
      {tensor(R"("dtype":"F32","shape":{},"data_offsets":[0,8])"), 8, "shape: got an object"},
      {tensor(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), 8, "need 12 bytes, data_offsets give 8"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), 8, "end before they begin"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0])"), 8, "must hold two numbers"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,8])"), 8, "data_offsets is too long"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8,16])"), 8, "truncated?"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[4,12])"), 12, "unused bytes stand before"},
      {tensor(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0])"), 0, "overflows"},
      {tensor(R"("dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0])"), 0, "overflows"},
      {tensor(R"("dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,0])"), 0, "out of range"},
      {tensor(R"("dtype":"U8","shape":[9223372036854775807],"data_offsets":[0,9223372036854775807])"), 8, "truncated?"},
      {R"({"__metadata__":{"a":1}})", 0, "metadata: key 'a': got a number, need a string"},
      {R"({"__metadata__":{"a":{}}})", 0, "metadata"},
      {R"({"__metadata__":{"a":"1","a":"2"}})", 0, "key 'a' stands twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "metadata: stands twice"},
      {R"({"a":{)" + good + R"(},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12, "overlap"},
      {std::string(100'000, '['), 0, "got a list"},
      {R"({"a":{"shape":)" + std::string(100'000, '['), 0, "got a list"},
      {std::string(R"({")") + "\xff" + R"(":{)" + good + "}}", 8, "not valid JSON"},
  };
  for (const auto& [header, data_bytes, fault] : cases) {
    const std::string message = refusal_of(header, data_bytes);
    EXPECT_THAT(message, HasSubstr(fault)) << header.substr(0, 100);
    EXPECT_THAT(message, HasSubstr("x.safetensors"));
  }
  std::string many = "1";
  for (int i = 0; i < 64; ++i) many += ",1";
  EXPECT_THAT(refusal_of(tensor(R"("dtype":"U8","shape":[)" + many + R"(],"data_offsets":[0,1])"), 1),
              HasSubstr("shape is too long"));
}

TEST_F(SafetensorsTest, RefusesToWriteWhatItCouldNotRead) {
  const std::byte bytes[4] = {};
  EXPECT_THROW(write_safetensors(path_, {{"__metadata__", "F32", {1}, bytes}}), UsageError);
  EXPECT_THROW(write_safetensors(path_, {{"a", "F32", {1}, bytes}, {"a", "F32", {1}, bytes}}), UsageError);
  EXPECT_THROW(write_safetensors(path_, {{"a", "F32", {2}, bytes}}), UsageError);
  EXPECT_THROW(write_safetensors(path_, {{"a", "F3", {1}, bytes}}), UsageError);
  EXPECT_THROW(write_safetensors(path_, {{"\xff", "F32", {1}, bytes}}), UsageError);
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(SafetensorsTest, SaysWhichFileIsMissing) {
  try {
    const SafetensorsFile file(path_);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("x.safetensors"));
  }
}

// The limit on file sizes fails writes as a full disk does.
TEST_F(SafetensorsTest, LeavesTheOldFileWhenTheDiskIsFull) {
  const std::string old = small_file(path_);
  const std::vector<float> large(1 << 16, 1.0f);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit = {4096, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_THROW(write_safetensors(path_, {{"a", "F32", {1 << 16}, std::as_bytes(std::span(large))}}), IoError);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(read_file(path_), old);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace furlong
