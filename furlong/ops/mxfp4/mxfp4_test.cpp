// The format: published orders, scales, quantisation. Dequantised values are exact, so comparisons are too.

#include "furlong/ops/mxfp4/mxfp4.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "furlong/base/error.h"
#include "furlong/ops/mxfp4/layout.h"
#include "furlong/ops/mxfp4/reference.h"
#include "tests/support/gradient.h"
#include "tests/support/simd_targets.h"

namespace furlong {
namespace {

using ::testing::HasSubstr;
using testing::on_every_simd_target;

constexpr Mxfp4Scale kRules[] = {Mxfp4Scale::kFloor, Mxfp4Scale::kEven};

/// Equal bit by bit, the sign of zero included; NaN equals NaN.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType bits = a.element_size() == 8 ? at::kLong : a.element_size() == 4 ? at::kInt : at::kShort;
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         (a.contiguous().view(bits).eq(b.contiguous().view(bits)) | (a.isnan() & b.isnan())).all().item<bool>();
}

at::Tensor bytes(at::IntArrayRef sizes, int64_t end = 256) {
  return at::randint(end, sizes, at::kByte);
}

/// Magnitudes from 2^-140 to the top of fp32, ties among them, zeros and whole blocks of zeros.
at::Tensor wild(int64_t rows, int64_t inputs) {
  at::Tensor x = at::randint(-32, 33, {rows, inputs}, at::kFloat) / 8;
  x = x * at::ones_like(x).mul(2).pow(at::randint(-140, 120, {rows, 1}, at::kFloat));
  x.view({-1, kMxBlock})[0] = 0.0;
  x[rows - 1][0] = std::numeric_limits<float>::max();
  return x;
}

template <typename Exception, typename Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what();
  }
  return "no error of this type";
}

TEST(Mxfp4Layout, PairOrderAndSplitHalvesAreToldApartByFormat) {
  // T17: the same 16 bytes in the two orders hold the same values at other places.
  EXPECT_EQ(mxfp4_layout("mxfp4-pack-quantized"), Mxfp4Layout::kPairs);
  EXPECT_EQ(mxfp4_layout("ggml-mxfp4"), Mxfp4Layout::kSplitHalves);
  EXPECT_THAT(message_of<FormatError>([] { mxfp4_layout("mxfp4"); }), HasSubstr("got 'mxfp4'"));

  const at::Tensor halves = at::zeros({1, 1, kSplitBlockBytes}, at::kByte);
  halves[0][0][0] = 128;
  halves[0][0][1] = 0x2F;   // elements 0 and 16: -6 and 1
  halves[0][0][16] = 0x70;  // elements 15 and 31: 0 and 6
  const auto [packed, scale] = mxfp4_from_split_halves(halves);
  at::Tensor expected = at::zeros({1, 32});
  expected[0][0] = -12.0;
  expected[0][16] = 2.0;
  expected[0][31] = 12.0;
  EXPECT_TRUE(at::equal(mxfp4_dequantize(packed, scale, at::kFloat), expected));

  at::Tensor pairs = at::zeros({1, 16}, at::kByte);
  pairs[0][0] = 0x2F;  // elements 0 and 1
  expected.zero_();
  expected[0][0] = -12.0;
  expected[0][1] = 2.0;
  EXPECT_TRUE(at::equal(mxfp4_dequantize(pairs, scale, at::kFloat), expected));
}

TEST(Mxfp4Layout, ConversionsAreInverse) {
  const at::Tensor packed = bytes({3, 5, 64}), scale = bytes({3, 5, 4}, 255);
  EXPECT_TRUE(at::equal(mxfp4_pack(mxfp4_unpack(packed)), packed));
  const at::Tensor blocks = mxfp4_to_split_halves(packed, scale);
  EXPECT_EQ(blocks.sizes(), at::IntArrayRef({3, 5, 4, 17}));
  const auto [packed_again, scale_again] = mxfp4_from_split_halves(blocks);
  EXPECT_TRUE(at::equal(packed_again, packed) && at::equal(scale_again, scale));
  EXPECT_THROW(mxfp4_pack(at::full({2}, 16, at::kByte)), UsageError);
  EXPECT_THROW(mxfp4_from_split_halves(bytes({3, 16})), UsageError);
}

TEST(Mxfp4, DequantizesEveryCodeUnderEveryScaleExactly) {
  // T18: bytes are exponents in every path, the smallest shapes included; byte 0 is 2^-127.
  const at::Tensor codes = at::arange(256, at::kByte).view({1, 256}).expand({255, 256}).contiguous();
  const at::Tensor scale = at::arange(255, at::kByte).view({255, 1}).expand({255, 16}).contiguous();
  const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  at::Tensor expected = at::zeros({255, 512}, at::kDouble);
  auto element = expected.accessor<double, 2>();
  for (int64_t byte = 0; byte < 255; ++byte) {
    for (int64_t i = 0; i < 512; ++i) {
      const int64_t code = i % 2 == 0 ? i / 2 % 16 : i / 32;
      element[byte][i] = std::ldexp(code < 8 ? magnitudes[code] : -magnitudes[code - 8], static_cast<int>(byte) - 127);
    }
  }
  on_every_simd_target([&] {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      EXPECT_TRUE(same_bits(mxfp4_dequantize(codes, scale, dtype), expected.to(dtype))) << c10::toString(dtype);
    }
  });
  EXPECT_TRUE(same_bits(mxfp4_dequantize_reference(codes, scale, at::kFloat), expected.to(at::kFloat)));
  for (int64_t byte = 0; byte < 253; ++byte) {  // every value is exact in bf16 too
    EXPECT_TRUE(same_bits(expected[byte].to(at::kBFloat16).to(at::kDouble), expected[byte]));
  }
}

TEST(Mxfp4, RefusesScaleByte255) {
  // T18: the byte is no number; the message names tensor, row and block.
  at::Tensor scale = bytes({3, 4, 5}, 255);
  check_mxfp4_scale("experts.7.w1.weight_scale", scale);
  scale[2][1][3] = 255;
  const std::string place = "row 9, block 3";
  EXPECT_THAT(message_of<FormatError>([&] { check_mxfp4_scale("experts.7.w1.weight_scale", scale); }),
              ::testing::AllOf(HasSubstr("experts.7.w1.weight_scale"), HasSubstr(place)));
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    EXPECT_THAT(message_of<FormatError>([&] { mxfp4_dequantize(bytes({3, 4, 80}), scale, dtype); }), HasSubstr(place));
  }
}

TEST(Mxfp4, QuantizeMatchesReference) {
  on_every_simd_target([] {
    for (const Mxfp4Scale rule : kRules) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        for (const at::Tensor& x : {wild(300, 96), at::randn({7, 3, 64}), at::randn({2000, 32})}) {
          const at::Tensor narrow = x.to(dtype).clamp(-3e38, 3e38);
          const auto [packed, scale] = mxfp4_quantize(narrow, rule);
          const auto [packed_expected, scale_expected] = mxfp4_quantize_reference(narrow, rule);
          EXPECT_TRUE(at::equal(scale, scale_expected));
          EXPECT_TRUE(at::equal(packed, packed_expected));
          EXPECT_TRUE(same_bits(mxfp4_fake_quantize(narrow, rule), mxfp4_dequantize(packed, scale, dtype)));
        }
      }
    }
  });
}

TEST(Mxfp4, WeightsOnTheGridComeBackByteByByte) {
  // Blocks whose largest code is 4 or 6, as in published files, under every scale that fp32 holds.
  at::Tensor codes = bytes({252, 64}, 16);
  codes.view({-1, kMxBlock}).select(1, 5).copy_(at::randint(6, 8, {504}, at::kByte) + at::randint(2, {504}) * 8);
  const at::Tensor packed = mxfp4_pack(codes);
  const at::Tensor scale = at::arange(252, at::kByte).view({252, 1}).expand({252, 2}).contiguous();
  for (const Mxfp4Scale rule : kRules) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const auto [packed_again, scale_again] = mxfp4_quantize(mxfp4_dequantize(packed, scale, dtype), rule);
      EXPECT_TRUE(at::equal(packed_again, packed) && at::equal(scale_again, scale));
    }
  }
}

TEST(Mxfp4, NamesTheBlockThatIsNotFinite) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    at::Tensor x = at::randn({40, 96});
    x[17][70] = bad;
    x[39][0] = bad;
    EXPECT_THAT(message_of<NumericError>([&] { mxfp4_quantize(x); }), HasSubstr("row 17, block 2"));
    const at::Tensor y = mxfp4_fake_quantize(x);
    EXPECT_EQ(y.isnan().sum().item<int64_t>(), 64);
    EXPECT_TRUE(y[17].slice(0, 64, 96).isnan().all().item<bool>());
    EXPECT_TRUE(same_bits(y, mxfp4_fake_quantize_reference(x, Mxfp4Scale::kFloor)));
  }
}

TEST(Mxfp4, GradientGoesStraightThrough) {
  const at::Tensor cotangent = at::randn({5, 64});
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const testing::Tensors x = {at::randn({5, 64}).to(dtype)};
    for (const testing::Function& op : {testing::Function([](const auto& t) { return mxfp4_fake_quantize(t[0]); }),
                                        testing::Function([](const auto& t) { return mxfp8_fake_quantize(t[0]); })}) {
      EXPECT_TRUE(at::equal(testing::gradients(op, x, cotangent)[0], cotangent.to(dtype)));
    }
  }
}

TEST(Mxfp4, HandlesEmptyAndStridedInputs) {
  EXPECT_EQ(mxfp4_fake_quantize(at::zeros({0, 64})).numel(), 0);
  EXPECT_EQ(mxfp4_dequantize(bytes({4, 0}), bytes({4, 0}), at::kFloat).sizes(), at::IntArrayRef({4, 0}));
  const at::Tensor wide = at::randn({6, 128});
  const at::Tensor half = wide.slice(1, 64, 128);
  EXPECT_TRUE(same_bits(mxfp4_fake_quantize(half), mxfp4_fake_quantize(half.contiguous())));
  const at::Tensor packed = bytes({6, 64}), scale = bytes({6, 4}, 255);
  EXPECT_TRUE(same_bits(mxfp4_dequantize(packed.slice(1, 16, 48), scale.slice(1, 1, 3), at::kFloat),
                        mxfp4_dequantize(packed, scale, at::kFloat).slice(1, 32, 96)));
}

TEST(Mxfp4, RefusesBadArguments) {
  EXPECT_THROW(mxfp4_quantize(at::randn({4, 48})), UsageError);
  EXPECT_THROW(mxfp4_fake_quantize(at::randn({4, 32}).to(at::kHalf)), UsageError);
  EXPECT_THROW(mxfp4_dequantize(bytes({4, 32}), bytes({4, 1}), at::kFloat), UsageError);
  EXPECT_THROW(mxfp4_dequantize(bytes({4, 32}), bytes({3, 2}), at::kFloat), UsageError);
  EXPECT_THROW(mxfp4_dequantize(bytes({4, 32}), bytes({4, 2}), at::kHalf), UsageError);
  EXPECT_THROW(mxfp4_dequantize(at::randn({4, 32}), bytes({4, 2}), at::kFloat), UsageError);
  EXPECT_THROW(mxfp4_scale_rule("nearest"), UsageError);
}

TEST(Mxfp4, ShapesWithoutData) {
  const at::Tensor x = at::randn({3, 64}).to(at::kMeta);
  const auto [packed, scale] = mxfp4_quantize(x);
  EXPECT_EQ(packed.sizes(), at::IntArrayRef({3, 32}));
  EXPECT_EQ(scale.sizes(), at::IntArrayRef({3, 2}));
  EXPECT_EQ(mxfp4_dequantize(packed, scale, at::kBFloat16).sizes(), x.sizes());
  EXPECT_EQ(mxfp4_fake_quantize(x).sizes(), x.sizes());
  EXPECT_EQ(mxfp8_fake_quantize(x).sizes(), x.sizes());
}

}  // namespace
}  // namespace furlong
