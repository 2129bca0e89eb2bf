// What must not change a bit of kda_chunk and kda_step_ on the CPU, and what they must not touch.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstdlib>
#include <memory>

#include "furlong/ops/kda/kda.h"
#include "tests/support/kda_inputs.h"
#include "tests/support/poisoned_memory.h"

namespace furlong {
namespace {

using namespace testing;

struct Problem {
  Inputs in;
  at::Tensor d_out, d_state;

  explicit Problem(Inputs inputs)
      : in(std::move(inputs)), d_out(at::randn(in.v.sizes())), d_state(at::randn(in.state.sizes())) {}

  /// Output, final state and every gradient.
  std::vector<at::Tensor> results() const {
    const KdaOutput output = run(kda_chunk, in);
    std::vector<at::Tensor> all = gradients(kda_chunk, in, d_out, d_state);
    all.insert(all.begin(), {output.out_NHV, output.final_state_BHKV});
    return all;
  }
};

void expect_same_bits(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].equal(expected[i])) << i;
}

// Where threads outnumber heads they share one: 517 has a last chunk of five rows and a last segment of one chunk.
std::vector<Problem> problems() {
  return {Problem(Inputs({33, 1, 0, 70}, 2, 32, 48)),       Problem(Inputs({517}, 1, 16, 64)),
          Problem(Inputs({133, 260}, 1, 24, 40)),           Problem(Inputs({64}, 4, 16, 16)),
          Problem(Inputs({45, 3}, 3, 5, 7, Gate::kAbrupt)), Problem(Inputs({90}, 2, 64, 64, Gate::kMixed).narrow())};
}

TEST(KdaIdentity, RepeatsGiveTheSameBits) {
  for (const Problem& problem : problems()) {
    const auto first = problem.results();
    for (int i = 0; i < 50; ++i) expect_same_bits(problem.results(), first);
  }
}

TEST(KdaIdentity, NeighboursChangeNoBits) {
  const std::vector<int64_t> lengths{1, 40, 0, 150, 33, 1};
  const Problem pack(Inputs(lengths, 2, 32, 48));
  const auto together = pack.results();
  int64_t first = 0;
  for (int64_t b = 0; b < static_cast<int64_t>(lengths.size()); ++b) {
    SCOPED_TRACE(b);
    const int64_t last = first + lengths[b];
    Problem alone = pack;
    alone.in.layout = SequenceLayout::from_lengths({lengths[b]});
    for (at::Tensor* x : {&alone.in.q, &alone.in.k, &alone.in.v, &alone.in.decay_log, &alone.in.beta, &alone.d_out}) {
      *x = x->slice(0, first, last);
    }
    for (at::Tensor* x : {&alone.in.state, &alone.d_state}) *x = x->slice(0, b, b + 1);
    // Output, final state, d_q, d_k, d_v, d_decay_log, d_beta, d_initial_state.
    std::vector<at::Tensor> expected = together;
    for (size_t i = 0; i < expected.size(); ++i) {
      const bool state = i == 1 || i == 7;
      expected[i] = state ? expected[i].slice(0, b, b + 1) : expected[i].slice(0, first, last);
    }
    expect_same_bits(alone.results(), expected);
    first = last;
  }
}

TEST(KdaIdentity, ThreadsChangeNoBits) {
  const int before = omp_get_max_threads();
  for (const Problem& problem : problems()) {
    omp_set_num_threads(1);
    const auto one = problem.results();
    for (const int threads : {2, 3, 16}) {
      omp_set_num_threads(threads);
      expect_same_bits(problem.results(), one);
    }
  }
  omp_set_num_threads(before);
}

TEST(KdaIdentity, FreshMemoryIsNeverRead) {
  {
    const PoisonedMemory poisoned;
    ASSERT_TRUE(at::empty({1 << 16}).isnan().all().item<bool>());
#ifndef FURLONG_SANITIZED
    const std::unique_ptr<float, decltype(&std::free)> memory(static_cast<float*>(std::malloc(1 << 20)), &std::free);
    ASSERT_TRUE(std::isnan(memory.get()[0]) && std::isnan(memory.get()[1000]));
#endif
  }
  for (const Problem& problem : problems()) {
    const auto expected = problem.results();
    const PoisonedMemory poisoned;
    expect_same_bits(problem.results(), expected);
  }
}

TEST(KdaIdentity, InputsStayAsTheyAre) {
  for (const Problem& problem : problems()) {
    Problem copy = problem;
    for (at::Tensor* x : copy.in.tensors()) *x = x->clone();
    problem.results();
    const Inputs& in = problem.in;
    expect_same_bits({in.q, in.k, in.v, in.decay_log, in.beta, in.state},
                     {copy.in.q, copy.in.k, copy.in.v, copy.in.decay_log, copy.in.beta, copy.in.state});
  }
}

/// A step on a pool in the middle of a wider one, so that both its ends have guards: output and the whole pool.
std::vector<at::Tensor> step(const Inputs& in, const at::Tensor& wide, const std::vector<int64_t>& slots) {
  const at::Tensor whole = wide.clone();
  at::Tensor pool = whole.slice(0, 2, whole.size(0) - 2);
  const at::Tensor out = kda_step_(in.q, in.k, in.v, in.decay_log, in.beta, pool, at::tensor(slots), in.scale());
  return {out, whole};
}

TEST(KdaIdentity, StepDependsOnItsSequenceAndWritesItsSlotOnly) {
  const at::NoGradGuard no_grad;
  const int before = omp_get_max_threads();
  for (const auto& [K, V] : {std::pair<int64_t, int64_t>{24, 40}, {128, 128}, {17, 33}}) {
    const std::vector<int64_t> slots{4, 0, 2};
    const Inputs in({1, 1, 1}, 3, K, V);
    const at::Tensor wide = at::randn({9, 3, K, V});
    omp_set_num_threads(1);
    const auto first = step(in, wide, slots);
    for (const int64_t untouched : {0, 1, 3, 5, 7, 8}) EXPECT_TRUE(first[1][untouched].equal(wide[untouched]));
    for (const int threads : {2, 3, 16}) {
      omp_set_num_threads(threads);
      for (int i = 0; i < 50; ++i) expect_same_bits(step(in, wide, slots), first);
    }
    {
      const PoisonedMemory poisoned;
      expect_same_bits(step(in, wide, slots), first);
    }
    for (int64_t b = 0; b < 3; ++b) {
      Inputs alone = in;
      for (at::Tensor* x : alone.tensors()) *x = x->slice(0, b, b + 1);
      const auto got = step(alone, wide, {slots[b]});
      EXPECT_TRUE(got[0].equal(first[0].slice(0, b, b + 1)));
      EXPECT_TRUE(got[1][slots[b] + 2].equal(first[1][slots[b] + 2]));
    }
  }
  omp_set_num_threads(before);
}

}  // namespace
}  // namespace furlong
