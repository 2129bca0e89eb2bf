// Times of KDA on the CPU for bench/peers/kda_cpu.sh: raw samples as one JSON line, in seconds. What is compared is
// sampled in turn, so that other load on the machine meets both sides.
//   kda_cpu_bench forward ROUNDS    T 4096, H 8, K = V = 128, fp32: product of 1024^3, forward, forward + gradient
//   kda_cpu_bench short ROUNDS      the forward at T = 1..64, H 8
//   kda_cpu_bench decode ROUNDS     a step of 512 sequences, H 32, and an in-place scale of the same state
//   kda_cpu_bench threads ROUNDS    T 16384, H 1 on one thread and on two; forward, and forward + gradient

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "furlong/ops/kda/kda.h"
#include "furlong/ops/norm/norm.h"

namespace furlong {
namespace {

struct Inputs {
  at::Tensor q, k, v, decay_log, beta;
  SequenceLayout layout;

  Inputs(int64_t tokens, int64_t heads, int64_t d) : layout(SequenceLayout::from_lengths({tokens})) {
    q = l2_norm(at::randn({tokens, heads, d}));
    k = l2_norm(at::randn({tokens, heads, d}));
    v = at::randn({tokens, heads, d});
    decay_log = at::rand({tokens, heads, d}) * -5.0;
    beta = at::rand({tokens, heads});
  }
  std::vector<at::Tensor> leaves() const { return {q, k, v, decay_log, beta}; }
  KdaOutput run() const { return kda_chunk(q, k, v, decay_log, beta, layout, {}, 0.088); }
};

using Samples = std::map<std::string, std::vector<double>>;

/// Seconds of one call, the mean of `calls`.
template <typename Body>
double seconds(int calls, const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls;
}

double forward_seconds(const Inputs& in, int calls = 1) {
  const at::NoGradGuard no_grad;
  return seconds(calls, [&] { in.run(); });
}

double training_seconds(const Inputs& in, const at::Tensor& d_out) {
  for (at::Tensor leaf : in.leaves()) leaf.requires_grad_();
  const double time = seconds(1, [&] { in.run().out_NHV.backward(d_out); });
  for (at::Tensor leaf : in.leaves()) leaf.mutable_grad() = at::Tensor();
  return time;
}

void sample_forward(int rounds, Samples& samples) {
  const Inputs in(4096, 8, 128);
  const at::Tensor d_out = at::randn(in.v.sizes()), a = at::randn({1024, 1024}), b = at::randn({1024, 1024});
  for (int i = 0; i < rounds; ++i) {
    samples["sgemm_1024"].push_back(seconds(3, [&] { at::mm(a, b); }));
    samples["forward"].push_back(forward_seconds(in));
    samples["training"].push_back(training_seconds(in, d_out));
    samples["forward"].push_back(forward_seconds(in));
  }
}

void sample_short(int rounds, Samples& samples) {
  for (const int64_t tokens : {1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64}) {
    const Inputs in(tokens, 8, 128);
    forward_seconds(in);
    for (int i = 0; i < rounds; ++i) samples[fmt::format("{}", tokens)].push_back(forward_seconds(in, 10));
  }
}

void sample_decode(int rounds, Samples& samples) {
  const at::NoGradGuard no_grad;
  const Inputs in(512, 32, 128);
  at::Tensor state = at::randn({512, 32, 128, 128});
  const at::Tensor slots = at::arange(512, at::kLong);
  for (int i = 0; i < rounds; ++i) {
    samples["scale"].push_back(seconds(1, [&] { state.mul_(0.999); }));
    samples["step"].push_back(
        seconds(1, [&] { kda_step_(in.q, in.k, in.v, in.decay_log, in.beta, state, slots, 0.088); }));
  }
}

void sample_threads(int rounds, Samples& samples) {
  const Inputs in(16384, 1, 128);
  const at::Tensor d_out = at::randn(in.v.sizes());
  for (int i = 0; i < rounds; ++i) {
    for (const int threads : {1, 2}) {
      at::set_num_threads(threads);
      samples[fmt::format("forward_{}", threads)].push_back(forward_seconds(in));
      samples[fmt::format("training_{}", threads)].push_back(training_seconds(in, d_out));
    }
  }
}

int run(const std::string& part, int rounds) {
  Samples samples;
  at::set_num_threads(2);
  if (part == "forward") {
    sample_forward(rounds, samples);
  } else if (part == "short") {
    sample_short(rounds, samples);
  } else if (part == "decode") {
    sample_decode(rounds, samples);
  } else if (part == "threads") {
    sample_threads(rounds, samples);
  } else {
    fmt::print(stderr, "kda_cpu_bench: no part '{}'\n", part);
    return 2;
  }
  std::string text;
  for (const auto& [name, values] : samples) {
    text += fmt::format("{}\"{}\": [{:.6g}]", text.empty() ? "" : ", ", name, fmt::join(values, ", "));
  }
  fmt::print("{{{}}}\n", text);
  return 0;
}

}  // namespace
}  // namespace furlong

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: kda_cpu_bench forward|short|decode|threads ROUNDS\n", stderr);
    return 2;
  }
  return furlong::run(argv[1], std::atoi(argv[2]));
}
