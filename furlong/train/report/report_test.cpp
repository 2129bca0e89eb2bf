#include "furlong/train/report/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/json.h"
#include "furlong/train/report/heat_map.h"
#include "furlong/train/report/line_chart.h"
#include "furlong/train/report/svg.h"

namespace furlong {
namespace {

namespace fs = std::filesystem;

class ReportTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() / ("furlong_report_" + std::to_string(getpid()) + "_" + test->name());
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  void write(const std::string& name, const std::string& text) const { write_file_atomic(folder_ / name, text); }

  /// A small hybrid of 4 layers and a run of 2 stages with one spike and one skipped step.
  void write_whole_run() const {
    write("config.toml", R"(clip = 1.0
[model]
vocab_size = 64
hidden_size = 16
num_layers = 4
full_attention_layers = [4]
intermediate_size = 32
attnres_block_size = 2
kda = { heads = 1, head_size = 16 }
mla = { heads = 1, kv_lora_rank = 8, qk_nope_head_dim = 8, qk_rope_head_dim = 4, v_head_dim = 8 }
moe = { num_experts = 4, experts_per_token = 2, expert_size = 8 }
)");
    std::string lines;
    for (int step = 1; step <= 40; ++step) lines += line(step).dump() + "\n";
    write("metrics.jsonl", lines);
    write("eval.json", R"({"bits_per_byte": 1.354, "nats_per_token": 3.1})");
    write("baselines.json", R"({"bytes": 384000, "gzip_bits_per_byte": 2.52, "xz_bits_per_byte": 2.16})");
    write("samples.jsonl", R"({"prompt": "In the", "text": "In the beginning", "temperature": 0.7})"
                           "\n");
  }

  static OrderedJson line(int step) {
    OrderedJson record = {
        {"step", step}, {"stage", step <= 30 ? "short" : "long"}, {"stage_index", step <= 30 ? 0 : 1}};
    record["context"] = step <= 30 ? 256 : 1024;
    record["tokens"] = 1000 * step;
    record["loss"] = step == 20 ? OrderedJson() : OrderedJson(5.0 / step + 2);
    record["grad_norm"] = step == 20 ? OrderedJson() : OrderedJson(step == 10 ? 30.0 : 1.0);
    record["verdict"] = step == 10 ? "spike" : step == 20 ? "skip" : "ok";
    record["reason"] = step == 10 ? "6 sigma" : "";
    record["tokens_per_s"] = 5000 + step;
    record["max_vio"] = 0.5;
    record["max_vio_mean"] = 0.3;
    record["bias_range"] = {nullptr, 0.1, 0.2, 0.3};
    record["decay_saturation"] = {0.1, 0.2, 0.3, nullptr};
    if (step % 10 == 0) {
      record["load"] = {nullptr, {10, 20, 30, 40}, {25, 25, 25, 25}, {0, 50, 50, 0}};
      record["attention_depth_weight"] = {{1.0}, {0.5, 0.5}, {0.4, 0.6}, {0.2, 0.3, 0.5}};
      record["mlp_depth_weight"] = {{0.5, 0.5}, {0.5, 0.5}, {0.2, 0.3, 0.5}, {0.2, 0.3, 0.5}};
      record["output_depth_weight"] = {0.2, 0.3, 0.5};
      record["position_loss"] = {{"first", {0, 1, 2}}, {"loss", {4.0, 3.0, nullptr}}, {"targets", {5, 5, 0}}};
    }
    return record;
  }

  std::string page() const { return report::render_report(report::read_run(folder_)); }

  std::string refusal() const {
    try {
      page();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  fs::path folder_;
};

/// The first tag that does not close as it should; empty when all do.
std::string first_unbalanced_tag(const std::string& html) {
  const std::vector<std::string> single = {"!doctype", "meta", "input"};
  std::vector<std::string> open;
  for (size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at + 1)) {
    const size_t end = html.find('>', at);
    if (end == std::string::npos) return "no end after " + html.substr(at, 20);
    const bool closing = html[at + 1] == '/';
    const size_t first = at + (closing ? 2 : 1);
    const std::string name = html.substr(first, html.find_first_of(" />", first) - first);
    if (closing) {
      if (open.empty() || open.back() != name) return "/" + name;
      open.pop_back();
    } else if (html[end - 1] != '/' && std::find(single.begin(), single.end(), name) == single.end()) {
      open.push_back(name);
    }
  }
  return open.empty() ? "" : open.back();
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

const std::vector<std::string> kTitles = {"Training loss by stage",
                                          "Loss by position in the context",
                                          "Held-out text: bits per byte",
                                          "Expert load by layer",
                                          "MaxVio",
                                          "Range of the correction bias",
                                          "Gradient norm",
                                          "Training speed",
                                          "Saturated decays by KDA layer",
                                          "Attention-residual weights by depth",
                                          "State and cache of one sequence"};

TEST_F(ReportTest, HasEverySectionOfAWholeRunAndIsValid) {
  write_whole_run();
  const std::string html = page();
  for (const std::string& title : kTitles) EXPECT_TRUE(contains(html, "<h3>" + title + "</h3>")) << title;
  EXPECT_TRUE(contains(html, "<h2>Samples</h2>"));
  EXPECT_FALSE(contains(html, "<h2>Not shown</h2>"));
  EXPECT_EQ(first_unbalanced_tag(html), "");
  EXPECT_TRUE(contains(html, "1 spike marked, 1 step skipped."));
  EXPECT_TRUE(contains(html, "1.354"));
}

TEST_F(ReportTest, LoadsNothingFromOutside) {
  write_whole_run();
  const std::string html = page();
  for (const char* part : {"http:", "https:", "src=", "href=", "<script", "@import", "url("})
    EXPECT_FALSE(contains(html, part)) << part;
  for (const char* part : {"nan", "inf\"", "-nan"}) EXPECT_FALSE(contains(html, part)) << part;
}

TEST_F(ReportTest, IsTheSameEachTime) {
  write_whole_run();
  EXPECT_EQ(page(), page());
}

TEST_F(ReportTest, EscapesEveryTextOfTheRun) {
  write_whole_run();
  write("samples.jsonl",
        R"({"prompt": "<script>alert(1)</script>", "text": "a & b </blockquote><img src=x onerror=y> 'q' \u0000 end"})"
        "\n");
  OrderedJson record = line(1);
  record["stage"] = "<b onclick=\"x\">stage</b>";
  record["verdict"] = "spike";
  record["reason"] = "</title></svg><script>";
  write("metrics.jsonl", record.dump() + "\n");
  const std::string html = page();
  EXPECT_FALSE(contains(html, "<script"));
  EXPECT_FALSE(contains(html, "<img"));
  EXPECT_FALSE(contains(html, "<b onclick"));
  EXPECT_TRUE(contains(html, "&lt;script&gt;alert(1)&lt;/script&gt;"));
  EXPECT_EQ(first_unbalanced_tag(html), "");
}

TEST_F(ReportTest, NamesTheFileThatWouldFeedAMissingSection) {
  for (const char* file : {"config.toml", "metrics.jsonl", "eval.json", "baselines.json", "samples.jsonl"}) {
    write_whole_run();
    fs::remove(folder_ / file);
    const std::string html = page();
    const size_t missing = html.find("<h2>Not shown</h2>");
    ASSERT_NE(missing, std::string::npos) << file;
    EXPECT_TRUE(contains(html.substr(missing), file)) << file;
    EXPECT_EQ(first_unbalanced_tag(html), "") << file;
  }
}

TEST_F(ReportTest, DrawsWhatALeanRunHas) {
  write("metrics.jsonl", R"({"step": 1, "stage": "a", "tokens": 10, "loss": 2.5})"
                         "\n");
  const std::string html = page();
  EXPECT_TRUE(contains(html, "Training loss by stage"));
  EXPECT_FALSE(contains(html, "<h2>Experts</h2>"));
  EXPECT_EQ(first_unbalanced_tag(html), "");
}

TEST_F(ReportTest, RefusesDamagedMetricsNamingFileAndLine) {
  const std::string good = line(1).dump() + "\n";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {good + R"({"step": 2, "stage")", "metrics.jsonl:2: cut short"},
      {good + "not json\n", "metrics.jsonl:2: not valid JSON"},
      {good + "[1]\n", "metrics.jsonl:2: need a JSON object"},
      {good + "\n", "metrics.jsonl:2: not valid JSON"},
      {good + good, "metrics.jsonl:2: step does not follow"},
      {good + R"({"step": 2, "stage": "a", "tokens": 2000})"
              "\n",
       "metrics.jsonl:2: loss is missing"},
      {good + R"({"step": 2, "stage": "a", "tokens": 2000, "loss": "low"})"
              "\n",
       "metrics.jsonl:2: loss must be a number"},
      {good + R"({"step": -2, "stage": "a", "tokens": 2000, "loss": 1})"
              "\n",
       "metrics.jsonl:2: step must be a whole"},
      {good + R"({"step": 1e300, "stage": "a", "tokens": 1, "loss": 1})"
              "\n",
       "metrics.jsonl:2: step must be a whole"},
      {good + R"({"step": 2, "stage": 7, "tokens": 2000, "loss": 1})"
              "\n",
       "metrics.jsonl:2: stage must be a string"},
      {good + R"({"step": 2, "stage": "a", "tokens": 2000, "loss": 1, "load": [3]})"
              "\n",
       "metrics.jsonl:2: load must be an array"},
  };
  for (const auto& [text, message] : cases) {
    write("metrics.jsonl", text);
    EXPECT_TRUE(contains(refusal(), message)) << refusal() << " / " << message;
  }
}

TEST_F(ReportTest, RefusesAFolderThatIsNoRun) {
  EXPECT_TRUE(contains(refusal(), "no run to report on"));
  folder_ /= "missing";
  EXPECT_TRUE(contains(refusal(), "not a folder"));
}

TEST(ReportEscape, ReplacesWhatIsNotUtf8) {
  EXPECT_EQ(report::escape("a\xff<\xe4\xb8\xad\xc0\x80"), "a\xef\xbf\xbd&lt;\xe4\xb8\xad\xef\xbf\xbd\xef\xbf\xbd");
}

TEST(ReportScale, TicksAreRound) {
  EXPECT_EQ(report::Scale(0, 10, 0, 1, false).ticks(5, report::Unit::kPlain), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(report::Scale(256, 4096, 0, 1, true).ticks(5, report::Unit::kContext),
            (std::vector<double>{256, 512, 1024, 2048, 4096}));
  EXPECT_EQ(report::format_number(1048576, report::Unit::kContext), "1M");
  EXPECT_EQ(report::format_number(0.0523, report::Unit::kPercent), "5.23%");
}

TEST(ReportLineChart, ThinningKeepsSpikesAndGaps) {
  report::Series series;
  for (int i = 0; i < 10000; ++i) {
    series.x.push_back(i);
    series.y.push_back(i == 4321 ? 99.0 : 1.0);
  }
  const report::Series thin = report::thin_out(series, 100);
  EXPECT_LE(thin.x.size(), 100u);
  EXPECT_EQ(*std::max_element(thin.y.begin(), thin.y.end()), 99.0);
}

}  // namespace
}  // namespace furlong
