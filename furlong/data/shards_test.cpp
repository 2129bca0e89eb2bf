#include "furlong/data/shards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/json.h"
#include "furlong/data/prepare.h"
#include "furlong/data/shard_writer.h"
#include "furlong/tokenizer/special_tokens.h"
#include "furlong/tokenizer/tokenizer.h"
#include "furlong/tokenizer/trainer.h"

namespace furlong {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class ShardsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("furlong_shards_test_" + std::to_string(getpid()));
    fs::remove_all(root_);
    make_folders(root_ / "shards");
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(int64_t vocab_size, const std::vector<std::vector<int64_t>>& documents, int64_t shard_tokens = 1000) {
    ShardWriter writer(root_ / "shards", vocab_size, shard_tokens);
    for (const auto& document : documents) writer.add_document(document, static_cast<int64_t>(document.size()) * 3);
    totals_ = writer.finish("digest", -1);
  }
  std::vector<int64_t> document(const ShardSet& shards, int64_t index) {
    std::vector<int64_t> tokens(static_cast<size_t>(shards.document_length(index)));
    shards.copy_tokens(index, 0, static_cast<int64_t>(tokens.size()), tokens.data());
    return tokens;
  }
  std::string refusal() {
    try {
      const ShardSet shards(root_ / "shards");
      for (int64_t d = 0; d < shards.num_documents(); ++d) document(shards, d);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }
  void change_meta(const std::string& pointer, const Json& value) {
    Json meta = read_json(root_ / "shards/meta.json");
    meta[Json::json_pointer(pointer)] = value;
    write_file_atomic(root_ / "shards/meta.json", meta.dump());
  }

  fs::path root_;
  ShardTotals totals_;
};

TEST_F(ShardsTest, DocumentsComeBack) {
  for (const int64_t vocab_size : {65'536, 65'537, 163'840}) {
    const std::vector<std::vector<int64_t>> documents = {
        {0, 1, vocab_size - 1}, {}, {255, 256, 65'535}, std::vector<int64_t>(50, 7), {3}};
    write(vocab_size, documents, 8);
    const ShardSet shards(root_ / "shards");
    ASSERT_EQ(shards.num_documents(), 5);
    for (int64_t d = 0; d < 5; ++d) {
      EXPECT_EQ(document(shards, d), documents[static_cast<size_t>(d)]);
      EXPECT_EQ(shards.document_bytes(d), shards.document_length(d) * 3);
    }
    EXPECT_EQ(shards.num_tokens(), 57);
    EXPECT_EQ(shards.num_bytes(), 171);
    EXPECT_EQ(shards.vocab_size(), vocab_size);
    EXPECT_EQ(shards.tokenizer_sha256(), "digest");
    EXPECT_EQ(totals_.shards, 3);  // a document longer than a shard has one of its own
  }
}

TEST_F(ShardsTest, CopiesPartsAndRefusesOthers) {
  write(100, {{1, 2, 3, 4}, {5, 6}});
  const ShardSet shards(root_ / "shards");
  std::vector<int64_t> part(2);
  shards.copy_tokens(0, 1, 2, part.data());
  EXPECT_EQ(part, (std::vector<int64_t>{2, 3}));
  EXPECT_THROW(shards.copy_tokens(0, 3, 2, part.data()), UsageError);
  EXPECT_THROW(shards.copy_tokens(0, -1, 1, part.data()), UsageError);
  EXPECT_THROW(shards.copy_tokens(2, 0, 1, part.data()), std::out_of_range);
}

TEST_F(ShardsTest, WriterRefusesTokensOutsideOfTheVocabulary) {
  EXPECT_THROW(write(100, {{1, 100}}), UsageError);
  EXPECT_THROW(write(100, {{-1}}), UsageError);
}

TEST_F(ShardsTest, NamesWhatIsDamaged) {
  write(100, {{1, 2, 3}, {4, 5}});
  EXPECT_EQ(refusal(), "no error");
  change_meta("/vocab_size", 4);
  EXPECT_THAT(refusal(), HasSubstr("holds token 5, the vocabulary has 4"));
  change_meta("/vocab_size", "many");
  EXPECT_THAT(refusal(), HasSubstr("vocab_size must be a whole number"));
  change_meta("/vocab_size", 100);
  change_meta("/shards/0/tokens", 6);
  EXPECT_THAT(refusal(), HasSubstr("holds 5 tokens of 2 documents, meta.json says otherwise"));
  change_meta("/shards/0/tokens", 5);
  change_meta("/shards/0/file", "../shards/shard-00000.safetensors");
  EXPECT_THAT(refusal(), HasSubstr("is not a plain name"));
  change_meta("/shards/0/file", "shard-00001.safetensors");
  EXPECT_THAT(refusal(), HasSubstr("shard-00001.safetensors: cannot open"));
  change_meta("/shards/0/file", "shard-00000.safetensors");
  EXPECT_EQ(refusal(), "no error");
  change_meta("/format", "other");
  EXPECT_THAT(refusal(), HasSubstr("format is not 'furlong-shards'"));
  write_file_atomic(root_ / "shards/meta.json", "[]");
  EXPECT_THAT(refusal(), HasSubstr("format is not 'furlong-shards'"));
  fs::remove(root_ / "shards/meta.json");
  EXPECT_THAT(refusal(), HasSubstr("no meta.json"));
}

TEST_F(ShardsTest, RefusesATruncatedShard) {
  write(100, {{1, 2, 3}, {4, 5}});
  const fs::path path = root_ / "shards/shard-00000.safetensors";
  const std::string content = read_file(path);
  for (size_t keep = 0; keep < content.size(); keep += 7) {
    write_file_atomic(path, content.substr(0, keep));
    EXPECT_THAT(refusal(), HasSubstr("shard-00000.safetensors")) << keep;
  }
}

class PrepareTest : public ShardsTest {
 protected:
  void SetUp() override {
    ShardsTest::SetUp();
    TokenizerTrainer trainer;
    trainer.add("and it came to pass and it came to pass");
    const auto tokens = trainer.train(270);
    make_folders(root_ / "tokenizer");
    make_folders(root_ / "text");
    write_file_atomic(root_ / "tokenizer/tiktoken.model", rank_file_text(tokens));
    write_file_atomic(root_ / "tokenizer/tokenizer_config.json",
                      SpecialTokens::standard(static_cast<int64_t>(tokens.size()), 16).to_json());
    options_.corpus.inputs = {root_ / "text"};
    options_.tokenizer = root_ / "tokenizer";
    options_.out = root_ / "out";
  }
  std::string prepare_refusal() {
    try {
      prepare_shards(options_);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }
  PrepareOptions options_;
};

TEST_F(PrepareTest, DocumentsEndWithTheEndTokenAndKeepTheirBytes) {
  write_file_atomic(root_ / "text/a.txt", "and it came\xff");
  write_file_atomic(root_ / "text/b.jsonl", "{\"text\": \"to pass\"}\n{\"text\": \"x\"}\n");
  const PrepareReport report = prepare_shards(options_);
  EXPECT_EQ(report.train.documents, 3);
  const auto tokenizer = Tokenizer::load(root_ / "out");  // its files are copied
  const ShardSet shards(root_ / "out");
  EXPECT_EQ(shards.tokenizer_sha256(), tokenizer.sha256());
  const std::vector<std::string> texts = {"and it came\xff", "to pass", "x"};
  for (int64_t d = 0; d < 3; ++d) {
    auto tokens = document(shards, d);
    EXPECT_EQ(tokens.back(), tokenizer.end_of_document());
    tokens.pop_back();
    EXPECT_EQ(tokenizer.decode(tokens), texts[static_cast<size_t>(d)]);
    EXPECT_EQ(shards.document_bytes(d), static_cast<int64_t>(texts[static_cast<size_t>(d)].size()));
  }
  EXPECT_EQ(read_json(root_ / "out/meta.json")["documents_end_with"], tokenizer.end_of_document());
}

TEST_F(PrepareTest, HoldsOutAShareOfTheDocuments) {
  std::string lines;
  for (int i = 0; i < 100; ++i) lines += "{\"text\": \"document " + std::to_string(i) + "\"}\n";
  write_file_atomic(root_ / "text/a.jsonl", lines);
  options_.val_fraction = 0.1;
  const PrepareReport report = prepare_shards(options_);
  EXPECT_EQ(report.val.documents, 10);
  EXPECT_EQ(report.train.documents, 90);
  EXPECT_EQ(ShardSet(root_ / "out/train").num_bytes() + ShardSet(root_ / "out/val").num_bytes(), 10 * 10 + 90 * 11);
}

TEST_F(PrepareTest, PicksOneDocumentOfEachStratum) {
  for (const double fraction : {0.5, 0.3, 0.07}) {
    int64_t picked = 0;
    for (int64_t i = 0; i < 10'000; ++i) picked += is_val_document(i, fraction, 3);
    EXPECT_NEAR(static_cast<double>(picked), 10'000 * fraction, 1.0) << fraction;
  }
}

TEST_F(PrepareTest, LeavesTheOldShardsWhenItFails) {
  write_file_atomic(root_ / "text/a.txt", "and it came to pass");
  prepare_shards(options_);
  write_file_atomic(root_ / "text/b.jsonl", "broken");
  EXPECT_THAT(prepare_refusal(), HasSubstr("b.jsonl:1: is not JSON"));
  EXPECT_EQ(ShardSet(root_ / "out").num_documents(), 1);
  fs::remove(root_ / "text/b.jsonl");
  write_file_atomic(root_ / "text/c.txt", "more");
  options_.out = root_ / "out/";  // also with a slash
  prepare_shards(options_);
  EXPECT_EQ(ShardSet(root_ / "out").num_documents(), 2);
}

TEST_F(PrepareTest, NeverReplacesAForeignFolder) {
  write_file_atomic(root_ / "text/a.txt", "and it came to pass");
  options_.out = root_ / "text";
  EXPECT_THAT(prepare_refusal(), HasSubstr("holds other files"));
  EXPECT_TRUE(fs::exists(root_ / "text/a.txt"));
  options_.out = root_ / "text/a.txt";
  EXPECT_THAT(prepare_refusal(), HasSubstr("is a file"));
}

TEST_F(PrepareTest, SaysWhatIsWrong) {
  EXPECT_THAT(prepare_refusal(), HasSubstr("holds no files"));
  EXPECT_FALSE(fs::exists(root_ / "out"));
  write_file_atomic(root_ / "text/a.txt", "one document");
  options_.val_fraction = 0.1;
  EXPECT_THAT(prepare_refusal(), HasSubstr("1 documents are too few to split"));
  options_.val_fraction = 1.5;
  EXPECT_THAT(prepare_refusal(), HasSubstr("--val-fraction: got 1.5"));
  options_.val_fraction = 0.0;
  options_.tokenizer = root_ / "nowhere";
  EXPECT_THAT(prepare_refusal(), HasSubstr("nowhere"));
}

}  // namespace
}  // namespace furlong
