#include "furlong/model/state.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <fstream>

#include "furlong/model/test_model.h"

namespace furlong {
namespace {

class StateTest : public ::testing::Test {
 protected:
  /// Feeds tokens [first, last) of the test's sequence to a slot; returns the hidden states.
  at::Tensor feed(DecoderState& state, int64_t slot, int64_t first, int64_t last) const {
    return decoder_->forward(tokens_.slice(0, first, last), state.layout({slot}, {last - first}), &state, {});
  }

  std::unique_ptr<Decoder> decoder_ = tiny_decoder({}, at::kFloat, false);
  at::Tensor tokens_ = random_tokens(100, 256, 1);
  std::filesystem::path file_ = std::filesystem::temp_directory_path() / "furlong_state_test.safetensors";
};

TEST_F(StateTest, SavedAndLoadedStateGoesOnBitForBit) {
  DecoderState state(*decoder_, 3);
  state.weight_version = 42;
  feed(state, 1, 0, 70);
  state.snapshot(1).save(file_);
  const at::Tensor straight = feed(state, 1, 70, 100);

  DecoderState other(*decoder_, 2);
  const SequenceState loaded = SequenceState::load(file_);
  EXPECT_EQ(loaded.position, 70);
  EXPECT_EQ(loaded.weight_version, 42u);
  other.restore(0, loaded);
  EXPECT_TRUE(at::equal(feed(other, 0, 70, 100), straight));
  EXPECT_EQ(other.token_hash(0), state.token_hash(1));
  std::filesystem::remove(file_);
}

TEST_F(StateTest, RewindsAndForks) {
  DecoderState state(*decoder_, 2);
  feed(state, 0, 0, 40);
  const SequenceState fork = state.snapshot(0);
  const at::Tensor first = feed(state, 0, 40, 60);
  state.restore(0, fork);
  state.restore(1, fork);
  EXPECT_TRUE(at::equal(feed(state, 0, 40, 60), first));
  EXPECT_TRUE(at::equal(feed(state, 1, 40, 60), first));
}

TEST_F(StateTest, ResetSlotIsAFreshSequence) {
  DecoderState state(*decoder_, 1);
  const at::Tensor fresh = feed(state, 0, 0, 30);
  state.reset(0);
  EXPECT_EQ(state.position(0), 0);
  EXPECT_TRUE(at::equal(feed(state, 0, 0, 30), fresh));
}

TEST_F(StateTest, SizeIsThatOfItsTensors) {
  DecoderState state(*decoder_, 1);
  feed(state, 0, 0, 10);
  // 3 KDA layers: 2 heads of 32 x 32 fp32, tails of 3 x 192 fp32; 2 MLA layers: 10 x (32 + 8) fp32.
  EXPECT_EQ(state.snapshot(0).size_bytes(), 3 * (2 * 32 * 32 + 3 * 192) * 4 + 2 * 10 * 40 * 4);
}

TEST_F(StateTest, RefusesAnotherArchitectureAndDamage) {
  DecoderState state(*decoder_, 1);
  feed(state, 0, 0, 10);
  const auto other = tiny_decoder({"mla.output_gate=false"}, at::kFloat, false);
  DecoderState other_state(*other, 1);
  EXPECT_THROW(other_state.restore(0, state.snapshot(0)), FormatError);

  state.snapshot(0).save(file_);
  const auto size = std::filesystem::file_size(file_);
  {
    std::fstream file(file_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(size - 5));
    file.put('\x5a');
  }
  EXPECT_THROW(SequenceState::load(file_), FormatError);
  std::filesystem::resize_file(file_, size / 2);
  EXPECT_THROW(SequenceState::load(file_), FormatError);
  std::filesystem::remove(file_);
}

TEST_F(StateTest, RefusesALayoutOfAnotherPosition) {
  DecoderState state(*decoder_, 1);
  feed(state, 0, 0, 10);
  const auto layout = SequenceLayout::with_state({5}, {0}, {3});
  EXPECT_THROW(decoder_->forward(tokens_.slice(0, 10, 15), layout, &state, {}), UsageError);
}

}  // namespace
}  // namespace furlong
