// Products from packed rows against dequantised matrices in fp64.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <limits>
#include <numeric>

#include "furlong/base/error.h"
#include "furlong/ops/mxfp4/mxfp4.h"
#include "furlong/ops/mxfp4/product.h"
#include "furlong/ops/mxfp4/reference.h"
#include "tests/support/gradient.h"
#include "tests/support/poisoned_memory.h"
#include "tests/support/simd_targets.h"
#include "tests/support/tolerance.h"

namespace furlong {
namespace {

using ::testing::HasSubstr;
using testing::on_every_simd_target;

struct Groups {
  std::vector<at::Tensor> packed, scale;
  at::Tensor x, offsets;

  /// `spare` rows stand behind the last group.
  Groups(const std::vector<int64_t>& rows, int64_t outputs, int64_t inputs, int64_t spare = 0) {
    std::vector<int64_t> bounds = {0};
    for (const int64_t count : rows) {
      bounds.push_back(bounds.back() + count);
      packed.push_back(at::randint(256, {outputs, inputs / 2}, at::kByte));
      scale.push_back(at::randint(118, 128, {outputs, inputs / kMxBlock}, at::kByte));
    }
    offsets = at::tensor(bounds, at::kLong);
    x = at::randn({bounds.back() + spare, inputs});
  }

  at::Tensor run(at::ScalarType dtype = at::kFloat) const {
    return mxfp4_grouped_linear(x.to(dtype), packed, scale, offsets);
  }
  at::Tensor oracle(at::ScalarType dtype = at::kFloat) const {
    return mxfp4_grouped_linear_reference(x.to(dtype).to(at::kDouble), packed, scale, offsets);
  }
};

double tolerance_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? tolerance::kFp32 : tolerance::kBf16;
}

TEST(Mxfp4Grouped, MatchesProductOfDequantizedMatrices) {
  // Every row tile and its rests, groups without rows, outputs that are no multiple of a tile, rows of one block.
  on_every_simd_target([] {
    for (const int64_t inputs : {32, 64, 96, 128, 224, 512}) {
      for (const int64_t outputs : {1, 3, 7, 70}) {
        const Groups groups({1, 0, 2, 3, 15, 0, 5, 31, 70, 0}, outputs, inputs);
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
          SCOPED_TRACE(std::to_string(outputs) + " x " + std::to_string(inputs) + " " + c10::toString(dtype));
          EXPECT_CLOSE(groups.run(dtype), groups.oracle(dtype), tolerance_of(dtype));
        }
      }
    }
  });
}

/// All rows of one group by the given kernels.
at::Tensor product_by(const Mxfp4ProductKernels& kernels, const Groups& groups, at::ScalarType dtype) {
  const at::Tensor x = groups.x.to(dtype), &packed = groups.packed[0], &scale = groups.scale[0];
  const int64_t rows = x.size(0), inputs = x.size(1), outputs = packed.size(0);
  const at::Tensor arranged = at::full({rows, kernels.arranged_bytes(inputs)}, 255, at::kByte);
  for (int64_t row = 0; row < rows; ++row) {
    kernels.arrange(x[row].const_data_ptr(), inputs, arranged[row].mutable_data_ptr());
  }
  const at::Tensor y = at::full({rows, outputs}, std::numeric_limits<float>::quiet_NaN(), dtype);
  const Mxfp4Matrix matrix = {packed.const_data_ptr<uint8_t>(), scale.const_data_ptr<uint8_t>(), packed.stride(0),
                              scale.stride(0), inputs};
  EXPECT_TRUE(kernels.product(matrix, 0, outputs, arranged.const_data_ptr(), rows, y.mutable_data_ptr(), outputs));
  return y;
}

TEST(Mxfp4Grouped, KernelsMatchTheOracle) {
  for (const int64_t inputs : {32, 160, 3584}) {
    const Groups groups({7}, 21, inputs);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const bool bf16 = dtype == at::kBFloat16;
      const at::Tensor expected = groups.oracle(dtype);
      EXPECT_CLOSE(product_by(mxfp4_simd_product_kernels(bf16), groups, dtype), expected, tolerance_of(dtype));
      const std::optional<Mxfp4ProductKernels> dot = mxfp4_dot_product_kernels();
      if (!bf16 || !dot) continue;
      EXPECT_CLOSE(product_by(*dot, groups, dtype), expected, tolerance_of(dtype));
    }
  }
}

TEST(Mxfp4Grouped, MatchesAtTheSizesOfPublishedExperts) {
  for (const int64_t rows : {1, 4, 80}) {
    const Groups groups({rows, rows}, 200, 3584);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      EXPECT_CLOSE(groups.run(dtype), groups.oracle(dtype), tolerance_of(dtype));
    }
  }
}

TEST(Mxfp4Grouped, ScaleBytesAreExponentsInEveryPath) {
  // T18: fewer than 8 outputs, byte 0 among the scales; one-hot rows of x read single weights back. Library products,
  // which the last group takes, may flush results below the normal range to zero.
  Groups groups({1, 9, 80}, 3, 64);
  for (at::Tensor& scale : groups.scale) {
    scale.copy_(at::randint(90, 160, scale.sizes(), at::kByte));
    scale[1][0] = 0;
  }
  groups.x.zero_();
  for (int64_t row = 0; row < groups.x.size(0); ++row) groups.x[row][row % 64] = 1.0;
  on_every_simd_target([&] {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor got = groups.run(dtype).to(at::kDouble), expected = groups.oracle(dtype);
      EXPECT_TRUE(at::equal(got.slice(0, 0, 10), expected.slice(0, 0, 10)));
      const at::Tensor flushed = got.eq(0) & expected.abs().lt(0x1p-126);
      EXPECT_TRUE((got.eq(expected) | flushed).all().item<bool>());
    }
  });
}

TEST(Mxfp4Grouped, ReadsStridesOfRowsAndStaysInsideTheLastMatrix) {
  // T19: matrices are views into a larger buffer; the last one ends where the allocation does (checked under ASan).
  constexpr int64_t kExperts = 3, kOutputs = 5, kInputs = 96;
  const at::Tensor packed = at::randint(256, {kExperts, kOutputs, kInputs}, at::kByte);
  const at::Tensor scale = at::randint(118, 128, {kExperts, kOutputs, kInputs / 16}, at::kByte);
  Groups groups({2, 1, 40}, kOutputs, kInputs);
  Groups dense = groups;
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    groups.packed[expert] = packed[expert].slice(1, kInputs / 2, kInputs);
    groups.scale[expert] = scale[expert].slice(1, kInputs / 32, kInputs / 16);
    dense.packed[expert] = groups.packed[expert].contiguous();
    dense.scale[expert] = groups.scale[expert].contiguous();
  }
  EXPECT_TRUE(at::equal(groups.run(), dense.run()));
  EXPECT_CLOSE(groups.run(), groups.oracle(), tolerance::kFp32);
}

TEST(Mxfp4Grouped, WritesEveryOutputAndZerosBehindTheLastGroup) {
  const testing::PoisonedMemory poisoned;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Groups groups({0, 3, 0, 40, 1}, 70, 96, 6);
    groups.x.slice(0, 44).fill_(std::numeric_limits<float>::quiet_NaN());
    const at::Tensor y = groups.run(dtype);
    EXPECT_TRUE(y.isfinite().all().item<bool>());
    EXPECT_TRUE(y.slice(0, 44).eq(0).all().item<bool>());
    EXPECT_CLOSE(y.slice(0, 0, 44), groups.oracle(dtype).slice(0, 0, 44), tolerance_of(dtype));
  }
}

TEST(Mxfp4Grouped, BitsDoNotDependOnThreads) {
  // Tasks are wide for 1 and 2 threads here, narrow for 3 and 7.
  const Groups groups({1, 3, 9, 100, 0, 33, 2, 1}, 700, 256);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor expected = groups.run(dtype);
    const int before = omp_get_max_threads();
    for (const int threads : {1, 2, 3, 7}) {
      omp_set_num_threads(threads);
      EXPECT_TRUE(at::equal(groups.run(dtype), expected)) << threads;
    }
    omp_set_num_threads(before);
  }
}

TEST(Mxfp4Grouped, BitsOfARowDoNotDependOnItsNeighbours) {
  on_every_simd_target([] {
    const Groups all({15}, 37, 224);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor expected = all.run(dtype);
      for (const int64_t row : {0, 7, 8, 11, 12, 14}) {
        Groups one = all;
        one.x = all.x.slice(0, row, row + 1);
        one.offsets = at::tensor({0, 1}, at::kLong);
        EXPECT_TRUE(at::equal(one.run(dtype), expected.slice(0, row, row + 1))) << row;
      }
    }
  });
}

TEST(Mxfp4Grouped, RefusesScaleByte255InEveryPath) {
  on_every_simd_target([] {
    for (const int64_t rows : {1, 3, 9, 80}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
        Groups groups({2, rows}, 9, 96);
        groups.scale[1][4][2] = 255;
        try {
          groups.run(dtype);
          ADD_FAILURE() << rows;
        } catch (const FormatError& error) {
          EXPECT_THAT(error.what(), HasSubstr("scale[1]: scale byte 255 (not a number) in row 4, block 2"));
        }
      }
    }
  });
}

TEST(Mxfp4Grouped, KeepsNanOfActivationsInItsRow) {
  for (const int64_t rows : {4, 80}) {
    Groups groups({rows}, 20, 64);
    groups.x[2][5] = std::numeric_limits<float>::quiet_NaN();
    const at::Tensor nan = groups.run().isnan();
    EXPECT_TRUE(nan[2].all().item<bool>());
    EXPECT_EQ(nan.sum().item<int64_t>(), 20);
  }
}

TEST(Mxfp4Grouped, GradientOfActivations) {
  const Groups groups({3, 0, 40}, 12, 64, 2);
  const at::Tensor cotangent = at::randn({45, 12});
  const auto op = [&](const testing::Tensors& t) {
    return mxfp4_grouped_linear(t[0], groups.packed, groups.scale, groups.offsets);
  };
  const at::Tensor got = testing::gradients(op, {groups.x}, cotangent)[0];
  const at::Tensor expected = testing::gradients(op, {groups.x.to(at::kDouble)}, cotangent.to(at::kDouble))[0];
  EXPECT_CLOSE(got, expected, tolerance::kFp32);
  EXPECT_TRUE(got.slice(0, 43).eq(0).all().item<bool>());
  const Groups small({2, 1}, 3, 32);
  const auto small_op = [&](const testing::Tensors& t) {
    return mxfp4_grouped_linear(t[0], small.packed, small.scale, small.offsets);
  };
  EXPECT_LE(testing::finite_difference_error(small_op, {small.x.to(at::kDouble)}, at::randn({3, 3}, at::kDouble)),
            tolerance::kFiniteDifference);
}

TEST(Mxfp4Grouped, HandlesEmptyAndStridedInputs) {
  EXPECT_EQ(Groups({0, 0}, 4, 64).run().sizes(), at::IntArrayRef({0, 4}));
  Groups groups({2, 1}, 4, 64);
  const at::Tensor expected = groups.run();
  groups.x = at::cat({groups.x, groups.x}, 1).slice(1, 0, 64);
  for (size_t group = 0; group < 2; ++group) {
    groups.packed[group] = groups.packed[group].t().contiguous().t();
    groups.scale[group] = groups.scale[group].t().contiguous().t();
  }
  EXPECT_TRUE(at::equal(groups.run(), expected));
}

TEST(Mxfp4Grouped, RefusesBadArguments) {
  const Groups good({2, 1}, 4, 64);
  const auto with = [&](const auto& change) {
    Groups groups = good;
    change(groups);
    EXPECT_THROW(groups.run(), UsageError);
  };
  with([](Groups& g) { g.packed.pop_back(); });
  with([](Groups& g) { g.packed[1] = g.packed[1].slice(0, 0, 3); });
  with([](Groups& g) { g.scale[0] = g.scale[0].slice(1, 0, 1); });
  with([](Groups& g) { g.scale[0] = g.scale[0].to(at::kInt); });
  with([](Groups& g) { g.x = g.x.slice(1, 0, 32); });
  with([](Groups& g) { g.x = g.x.slice(0, 0, 2); });
  with([](Groups& g) { g.offsets = at::tensor({0, 3, 2}, at::kLong); });
  with([](Groups& g) { g.offsets = at::tensor({1, 2, 3}, at::kLong); });
  with([](Groups& g) { g.offsets = at::tensor({0, 2}, at::kLong); });
  with([](Groups& g) { g.packed.clear(), g.scale.clear(), g.offsets = at::zeros({1}, at::kLong); });
  EXPECT_THROW(good.run(at::kHalf), UsageError);
}

TEST(Mxfp4Grouped, ShapesWithoutData) {
  Groups groups({2, 1}, 4, 64);
  groups.x = groups.x.to(at::kMeta);
  groups.offsets = groups.offsets.to(at::kMeta);
  for (size_t group = 0; group < 2; ++group) {
    groups.packed[group] = groups.packed[group].to(at::kMeta);
    groups.scale[group] = groups.scale[group].to(at::kMeta);
  }
  EXPECT_EQ(groups.run().sizes(), at::IntArrayRef({3, 4}));
}

}  // namespace
}  // namespace furlong
