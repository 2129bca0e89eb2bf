#include "furlong/infer/engine.h"

#include <gtest/gtest.h>

#include "furlong/model/test_model.h"

namespace furlong {
namespace {

class EngineTest : public ::testing::Test {
 protected:
  static GenerateRequest request() {
    GenerateRequest request;
    for (int64_t i = 0; i < 37; ++i) request.prompt_ids.push_back((i * 7 + 3) % 256);
    request.max_tokens = 20;
    request.sampling = {.temperature = 1.0, .top_p = 0.95, .seed = 9};
    return request;
  }
  std::unique_ptr<Decoder> decoder_ = tiny_decoder({}, at::kFloat, false);
};

TEST_F(EngineTest, SameSeedGivesTheSameTokensForAnyPrefillChunk) {
  const GenerateResult whole = Engine(*decoder_).generate(request());
  EXPECT_EQ(whole.ids.size(), 20u);
  EXPECT_EQ(whole.prompt_tokens, 37);
  for (const int64_t chunk : {1, 5, 16}) {
    EXPECT_EQ(Engine(*decoder_, {.prefill_chunk_tokens = chunk}).generate(request()).ids, whole.ids) << chunk;
  }
  GenerateRequest other = request();
  other.sampling.seed = 10;
  EXPECT_NE(Engine(*decoder_).generate(other).ids, whole.ids);
}

TEST_F(EngineTest, ASecondRequestStartsFresh) {
  Engine engine(*decoder_);
  const GenerateResult first = engine.generate(request());
  EXPECT_EQ(engine.generate(request()).ids, first.ids);
}

TEST_F(EngineTest, StopsAtStopIdsAndWhenTheCallbackSaysSo) {
  Engine engine(*decoder_);
  const std::vector<int64_t> ids = engine.generate(request()).ids;
  GenerateRequest stopping = request();
  stopping.stop_ids = {ids[5]};
  const GenerateResult stopped = engine.generate(stopping);
  EXPECT_EQ(stopped.reason, StopReason::kStopId);
  EXPECT_LE(stopped.ids.size(), 5u);
  const GenerateResult cancelled = engine.generate(request(), [&](int64_t id) { return id != ids[2]; });
  EXPECT_EQ(cancelled.reason, StopReason::kCancelled);
  EXPECT_LE(cancelled.ids.size(), 3u);
}

TEST_F(EngineTest, DrawsOnlyIdsThatTheTokenizerHas) {
  GenerateRequest few = request();
  few.num_ids = 3;
  for (const int64_t id : Engine(*decoder_).generate(few).ids) EXPECT_LT(id, 3);
  GenerateRequest all = request();
  all.num_ids = 1000;  // more than the model has
  EXPECT_EQ(Engine(*decoder_).generate(all).ids, Engine(*decoder_).generate(request()).ids);
}

TEST_F(EngineTest, RefusesBadRequests) {
  Engine engine(*decoder_);
  GenerateRequest empty = request();
  empty.prompt_ids.clear();
  EXPECT_THROW(engine.generate(empty), UsageError);
  GenerateRequest outside = request();
  outside.prompt_ids[0] = 256;
  EXPECT_THROW(engine.generate(outside), UsageError);
  GenerateRequest long_request = request();
  long_request.max_tokens = 8192;
  EXPECT_THROW(engine.generate(long_request), UsageError);
}

}  // namespace
}  // namespace furlong
