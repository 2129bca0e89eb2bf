#include "furlong/data/corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/file.h"

namespace furlong {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CorpusTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("furlong_corpus_test_" + std::to_string(getpid()));
    fs::remove_all(root_);
    make_folders(root_);
    options_.inputs = {root_};
  }
  void TearDown() override { fs::remove_all(root_); }

  void put(const std::string& name, const std::string& content) {
    make_folders((root_ / name).parent_path());
    write_file_atomic(root_ / name, content);
  }
  std::vector<std::string> read() {
    std::vector<std::string> texts;
    counts_ = read_corpus(options_, [&](std::string_view text) { texts.emplace_back(text); });
    return texts;
  }
  template <typename ErrorType>
  std::string refusal() {
    try {
      read();
    } catch (const ErrorType& error) {
      return error.what();
    }
    return "no error of this kind";
  }

  fs::path root_;
  CorpusOptions options_;
  CorpusCounts counts_;
};

TEST_F(CorpusTest, ReadsAFolderDeepAndInOrder) {
  put("b.txt", "two");
  put("a.md", "one");
  put("c/d.txt", "three");
  put(".git/config", "hidden");
  put("c/.hidden", "hidden");
  EXPECT_THAT(read(), ElementsAre("one", "two", "three"));
  EXPECT_EQ(counts_.files, 3);
}

TEST_F(CorpusTest, SelectsByGlob) {
  put("a.txt", "one");
  put("b.md", "two");
  put("sub/c.txt", "three");
  options_.only = {"*.txt"};
  EXPECT_THAT(read(), ElementsAre("one", "three"));
  options_.exclude = {"sub/*"};
  EXPECT_THAT(read(), ElementsAre("one"));
  options_.exclude = {"*"};
  EXPECT_THAT(refusal<UsageError>(), HasSubstr("holds no files that --only and --exclude leave"));
}

TEST_F(CorpusTest, SplitsAtSeparatorLines) {
  put("a.txt", "one\n%%\ntwo\n%% \nstill two\n%%\r\n\n%%\nlast");
  options_.split_on = "%%";
  EXPECT_THAT(read(), ElementsAre("one\n", "two\n%% \nstill two\n", "last"));
  EXPECT_EQ(counts_.empty, 1);
}

TEST_F(CorpusTest, ReadsJsonLines) {
  put("a.jsonl", "{\"text\": \"one\"}\n\n{\"id\": 7, \"text\": \"two\\nlines \\u00e9\"}\r\n{\"text\": \"\"}");
  EXPECT_THAT(read(), ElementsAre("one", "two\nlines \u00e9"));
  EXPECT_EQ(counts_.empty, 1);
  put("a.jsonl", "{\"body\": \"b\", \"text\": \"t\"}");
  options_.field = "body";
  EXPECT_THAT(read(), ElementsAre("b"));
}

TEST_F(CorpusTest, NamesFileAndLineOfBadJson) {
  const std::pair<const char*, const char*> cases[] = {{"{\"text\": \"cut", "a.jsonl:2: is not JSON"},
                                                       {"[1]", "a.jsonl:2: is not a JSON object"},
                                                       {"{\"body\": \"x\"}", "a.jsonl:2: has no field 'text'"},
                                                       {"{\"text\": 7}", "a.jsonl:2: field 'text' is not a string"},
                                                       {"{\"text\": \"\xff\"}", "a.jsonl:2: is not JSON"}};
  for (const auto& [line, message] : cases) {
    put("a.jsonl", std::string("{\"text\": \"good\"}\n") + line + "\n");
    options_.skip_bad = false;
    EXPECT_THAT(refusal<FormatError>(), HasSubstr(message));
    options_.skip_bad = true;
    EXPECT_THAT(read(), ElementsAre("good"));
    EXPECT_EQ(counts_.bad_lines, 1);
  }
}

TEST_F(CorpusTest, RefusesBinaryFilesByName) {
  const std::string binary("PK\x03\x04\0\0", 6);
  put("a.zip", binary);
  EXPECT_THAT(refusal<UsageError>(), HasSubstr("a.zip: is binary"));
  options_.binary = true;
  EXPECT_THAT(read(), ElementsAre(binary));
}

TEST_F(CorpusTest, RefusesEmptyInput) {
  EXPECT_THAT(refusal<UsageError>(), HasSubstr("holds no files"));
  put("a.txt", "");
  put("b.txt", " \n\n");
  EXPECT_THAT(refusal<UsageError>(), HasSubstr("no text found in 2 files"));
  options_.inputs = {root_ / "missing"};
  EXPECT_THAT(refusal<IoError>(), HasSubstr("missing: there is no such file or folder"));
}

TEST_F(CorpusTest, TakesOneByteForADocument) {
  put("a.txt", "x");
  EXPECT_THAT(read(), ElementsAre("x"));
}

}  // namespace
}  // namespace furlong
