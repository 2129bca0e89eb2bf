// The CUDA decode kernel against the recurrence in fp64 on the CPU; torch-free.
//
//   cuda_step_test              every check, one line each; exit code 1 if one fails, 0 with SKIP without a GPU
//   cuda_step_test --small      one case of each kind of kernel, for compute-sanitizer

#include <omp.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "furlong/ops/common/cuda_test_support.h"
#include "furlong/ops/kda/cuda/args.h"

namespace furlong::kda::cuda {
namespace {

using test::check;
using test::DeviceBuffer;
using test::require_success;

using Gate = GateForm;

struct Case {
  int64_t B, H;
  int K, V;
  bool bf16;
  Gate gate;
  float decay_scale;  // of a given decay_log, uniform in (-decay_scale, 0]; negative: that value itself
  bool strided = false;
};

/// Inputs as the kernel gets them (rounded to bf16 where they are bf16), with the state of all slots.
struct HostInputs {
  std::vector<float> q, k, v, decay, beta, a_log, dt_bias, state;
  std::vector<int64_t> slots;
  int64_t S;
};

float rounded(float x, bool bf16) {
  return bf16 ? __bfloat162float(__float2bfloat16(x)) : x;
}

HostInputs make_inputs(const Case& c, uint64_t seed, int64_t slots = 0) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0, 1);
  HostInputs in;
  in.S = slots > 0 ? slots : 2 * c.B + 1;
  const auto fill = [&](std::vector<float>& x, int64_t n, bool bf16, auto draw) {
    x.resize(n);
    for (float& value : x) value = rounded(draw(), bf16);
  };
  const auto gaussian = [&] { return normal(engine); };
  const bool fused = c.gate != Gate::kGiven;
  fill(in.q, c.B * c.H * c.K, c.bf16, gaussian);
  fill(in.k, c.B * c.H * c.K, c.bf16, gaussian);
  if (!fused) {
    for (auto* x : {&in.q, &in.k}) {
      for (int64_t row = 0; row < c.B * c.H; ++row) {
        double sum = 0;
        for (int d = 0; d < c.K; ++d) sum += std::pow((*x)[row * c.K + d], 2);
        for (int d = 0; d < c.K; ++d) {
          (*x)[row * c.K + d] = rounded(static_cast<float>((*x)[row * c.K + d] / std::sqrt(sum)), c.bf16);
        }
      }
    }
  }
  fill(in.v, c.B * c.H * c.V, c.bf16, gaussian);
  fill(in.decay, c.B * c.H * c.K, fused && c.bf16, [&] {
    if (fused) return normal(engine);
    return c.decay_scale < 0 ? c.decay_scale : -c.decay_scale * uniform(engine);
  });
  fill(in.beta, c.B * c.H, fused && c.bf16, [&] { return fused ? normal(engine) : uniform(engine); });
  fill(in.a_log, c.H, false, [&] { return 0.5f * normal(engine); });
  fill(in.dt_bias, c.H * c.K, false, gaussian);
  fill(in.state, in.S * c.H * c.K * c.V, false, gaussian);
  for (int64_t b = 0; b < c.B; ++b) in.slots.push_back(in.S == 1 ? 0 : (2 * b + 3) % in.S);
  return in;
}

double gate_of(const Case& c, const HostInputs& in, int64_t bh, int64_t h, int d) {
  const double z = in.decay[bh * c.K + d];
  if (c.gate == Gate::kGiven) return z;
  const double a = std::exp(static_cast<double>(in.a_log[h])), biased = z + in.dt_bias[h * c.K + d];
  if (c.gate == Gate::kBounded) return -5 / (1 + std::exp(-a * biased));
  return -a * (biased > 20 ? biased : std::log1p(std::exp(biased)));
}

/// One step in fp64; state is updated.
std::vector<double> reference(const Case& c, const HostInputs& in, std::vector<double>& state, double scale) {
  std::vector<double> out(c.B * c.H * c.V);
  const bool fused = c.gate != Gate::kGiven;
#pragma omp parallel for
  for (int64_t bh = 0; bh < c.B * c.H; ++bh) {
    const int64_t b = bh / c.H, h = bh % c.H;
    double* S = state.data() + (in.slots[b] * c.H + h) * c.K * c.V;
    std::vector<double> q(c.K), k(c.K);
    double qq = 1e-6, kk = 1e-6;
    for (int d = 0; d < c.K; ++d) {
      q[d] = in.q[bh * c.K + d];
      k[d] = in.k[bh * c.K + d];
      qq += q[d] * q[d];
      kk += k[d] * k[d];
    }
    double beta = in.beta[bh];
    if (fused) {
      beta = 1 / (1 + std::exp(-beta));
      for (int d = 0; d < c.K; ++d) q[d] /= std::sqrt(qq), k[d] /= std::sqrt(kk);
    }
    for (int d = 0; d < c.K; ++d) {
      const double decay = std::exp(gate_of(c, in, bh, h, d));
      for (int e = 0; e < c.V; ++e) S[d * c.V + e] *= decay;
    }
    for (int e = 0; e < c.V; ++e) {
      double recalled = 0, read = 0;
      for (int d = 0; d < c.K; ++d) recalled += k[d] * S[d * c.V + e];
      const double write = beta * (in.v[bh * c.V + e] - recalled);
      for (int d = 0; d < c.K; ++d) {
        S[d * c.V + e] += k[d] * write;
        read += q[d] * S[d * c.V + e];
      }
      out[bh * c.V + e] = scale * read;
    }
  }
  return out;
}

/// Device copies of a case's inputs, in guard zones, and the launch that reads them.
struct Device {
  DeviceBuffer q, k, v, decay, beta, a_log, dt_bias, state, slots, out;
  StepArgs launch;

  Device(const Case& c, const HostInputs& in, float scale) {
    const bool fused = c.gate != Gate::kGiven;
    // Strided: rows of q, k and v lie 3 apart, as slices of one wide projection do.
    const int64_t spread = c.strided ? 3 : 1;
    const auto rows = [&](DeviceBuffer& buffer, const std::vector<float>& x, int columns, bool bf16, int64_t gap) {
      std::vector<float> wide(x.size() * gap, std::nanf(""));
      for (size_t row = 0; row < x.size() / columns; ++row) {
        std::copy_n(x.begin() + row * columns, columns, wide.begin() + row * gap * columns);
      }
      buffer.upload(wide, bf16);
      return Rows{buffer.data(), c.H * columns * gap, columns * gap, bf16 ? Element::kBFloat16 : Element::kFloat};
    };
    Inputs& args = launch.in;
    args.sequences = c.B, args.heads = c.H, args.key_size = c.K, args.value_size = c.V, args.scale = scale;
    args.gate_form = c.gate;
    args.beta_is_logit = args.l2_norm = fused;
    args.q_NHK = rows(q, in.q, c.K, c.bf16, spread);
    args.k_NHK = rows(k, in.k, c.K, c.bf16, spread);
    args.v_NHV = rows(v, in.v, c.V, c.bf16, spread);
    args.gate_NHK = rows(decay, in.decay, c.K, fused && c.bf16, spread);
    args.beta_NH = rows(beta, in.beta, 1, fused && c.bf16, 1);
    if (fused) {
      a_log.upload(in.a_log, false);
      dt_bias.upload(in.dt_bias, false);
      args.a_log_H = static_cast<const float*>(a_log.data());
      args.dt_bias_HK = static_cast<const float*>(dt_bias.data());
    }
    state.upload(in.state, false);
    launch.slots = in.S;
    launch.state_SHKV = static_cast<float*>(state.data());
    slots.upload_bytes(in.slots.data(), in.slots.size() * sizeof(int64_t));
    launch.slots_B = static_cast<const int64_t*>(slots.data());
    out.upload(std::vector<float>(c.B * c.H * c.V, std::nanf("")), c.bf16);
    launch.out_BHV = out.data();
  }

  void run() {
    require_success(launch_step(launch), "launch_step");
    require_success(cudaDeviceSynchronize(), "step kernel");
  }
  bool guards_hold() const {
    for (const DeviceBuffer* buffer : {&q, &k, &v, &decay, &beta, &state, &out}) {
      if (!buffer->guards_hold()) return false;
    }
    return true;
  }
};

std::string name_of(const Case& c) {
  const char* gates[] = {"given", "bounded", "softplus"};
  char text[128];
  std::snprintf(text, sizeof text, "B %d H %d K %d V %d %s gate %s%s", static_cast<int>(c.B), static_cast<int>(c.H),
                c.K, c.V, c.bf16 ? "bf16" : "fp32", gates[static_cast<int>(c.gate)], c.strided ? " strided" : "");
  return text;
}

void compare(const Case& c, int steps) {
  const HostInputs first = make_inputs(c, 1);
  std::vector<double> state(first.state.begin(), first.state.end());
  const float scale = 1 / std::sqrt(static_cast<float>(c.K));
  HostInputs in = first;
  double out_error = 0;
  bool guards = true;
  for (int step = 0; step < steps; ++step) {
    const std::vector<float> carried = in.state;
    in = make_inputs(c, 1 + step);
    if (step > 0) in.state = carried;
    Device device(c, in, scale);
    device.run();
    const std::vector<double> expected = reference(c, in, state, scale);
    out_error = std::max(out_error, test::relative_error(device.out.download(c.bf16), expected));
    guards = guards && device.guards_hold();
    in.state = device.state.download(false);
  }
  // fp32: sums of K terms in another order.
  check(name_of(c) + ": out", out_error <= (c.bf16 ? test::kBf16Rounding : 1e-5), out_error);
  const double state_error = test::relative_error(in.state, state);
  check(name_of(c) + ": state", state_error <= 1e-5, state_error);
  check(name_of(c) + ": guard zones", guards, guards ? 0 : 1);
}

/// A state after 4096 steps of slow decay, beta from bf16: the decay's own rounding must not add up.
void compare_long_memory() {
  const Case all{4096, 2, 64, 64, false, Gate::kGiven, -1e-4f};
  Case one = all;
  one.B = 1;
  HostInputs in = make_inputs(all, 3, 1);
  for (float& beta : in.beta) beta = rounded(beta, true);
  const float scale = 0.125f;
  Device device(all, in, scale);
  device.launch.in.sequences = 1;
  std::vector<double> state(in.state.begin(), in.state.end()), expected;
  for (int64_t t = 0; t < all.B; ++t) {
    require_success(launch_step(device.launch), "launch_step");
    for (Rows* rows : {&device.launch.in.q_NHK, &device.launch.in.k_NHK, &device.launch.in.v_NHV,
                       &device.launch.in.gate_NHK, &device.launch.in.beta_NH}) {
      rows->data = static_cast<const float*>(rows->data) + rows->token_stride;
    }
    const auto cut = [&](const std::vector<float>& x, int64_t row) {
      return std::vector<float>(x.begin() + t * row, x.begin() + (t + 1) * row);
    };
    HostInputs token;
    token.q = cut(in.q, all.H * all.K), token.k = cut(in.k, all.H * all.K), token.v = cut(in.v, all.H * all.V);
    token.decay = cut(in.decay, all.H * all.K), token.beta = cut(in.beta, all.H);
    token.slots = {0};
    expected = reference(one, token, state, scale);
  }
  require_success(cudaDeviceSynchronize(), "step kernel");
  std::vector<float> out = device.out.download(false);
  out.resize(expected.size());
  const double state_error = test::relative_error(device.state.download(false), state);
  check("4096 steps at decay 0.9999: state", state_error <= 1e-5, state_error);
  const double out_error = test::relative_error(out, expected);
  check("4096 steps at decay 0.9999: out", out_error <= 1e-5, out_error);
}

void repeats_and_neighbours() {
  const Case c{5, 3, 128, 128, true, Gate::kBounded, 0};
  const HostInputs in = make_inputs(c, 7);
  Device device(c, in, 0.1f);
  device.run();
  const auto out = device.out.download(true), state = device.state.download(false);
  bool same = true;
  for (int i = 0; i < 50; ++i) {
    Device again(c, in, 0.1f);
    again.run();
    same = same && again.out.download(true) == out && again.state.download(false) == state;
  }
  check("50 repeats give the same bits", same, 0);
  Device alone(c, in, 0.1f);
  const int64_t b = 3;
  alone.launch.in.sequences = 1;
  alone.launch.slots_B += b;
  const auto shift = [&](Rows& rows, int64_t size) {
    rows.data = static_cast<const char*>(rows.data) + b * rows.token_stride * size;
  };
  shift(alone.launch.in.q_NHK, 2), shift(alone.launch.in.k_NHK, 2), shift(alone.launch.in.v_NHV, 2);
  shift(alone.launch.in.gate_NHK, 2), shift(alone.launch.in.beta_NH, 2);
  alone.run();
  const auto one = alone.out.download(true);
  const bool equal = std::equal(one.begin(), one.begin() + c.H * c.V, out.begin() + b * c.H * c.V);
  check("a sequence alone gives the same bits as among others", equal, 0);
}

int run_small() {
  for (const bool bf16 : {false, true}) {
    compare({3, 2, 64, 64, bf16, Gate::kBounded, 5, true}, 2);
    compare({2, 3, 128, 128, bf16, Gate::kSoftplus, 5}, 2);
    compare({2, 2, 60, 100, bf16, Gate::kGiven, 5, true}, 2);
    compare({1, 2, 256, 130, bf16, Gate::kBounded, 5}, 1);
  }
  return test::summary();
}

int run_all() {
  for (const bool bf16 : {false, true}) {
    for (const Gate gate : {Gate::kGiven, Gate::kBounded, Gate::kSoftplus}) {
      for (const int d : {64, 128}) compare({3, 4, d, d, bf16, gate, 5}, 3);
      compare({2, 3, 128, 64, bf16, gate, 5, true}, 3);
    }
    for (const auto& [K, V] : {std::pair{16, 16},
                               {60, 100},
                               {100, 60},
                               {128, 96},
                               {1, 1},
                               {80, 7},
                               {192, 256},
                               {256, 128},
                               {256, 256},
                               {33, 130}}) {
      compare({2, 2, K, V, bf16, Gate::kGiven, 5, true}, 2);
      compare({2, 2, K, V, bf16, Gate::kBounded, 5}, 2);
    }
  }
  for (const float decay : {-1000.0f, -8.0f, -4.0f, -0.0f}) compare({2, 2, 128, 128, false, Gate::kGiven, decay}, 8);
  compare({0, 2, 128, 128, false, Gate::kGiven, 5}, 1);
  compare({64, 32, 128, 128, true, Gate::kBounded, 5}, 1);
  compare_long_memory();
  repeats_and_neighbours();
  return test::summary();
}

}  // namespace
}  // namespace furlong::kda::cuda

int main(int argc, char** argv) {
  if (!furlong::test::has_gpu()) return 0;
  const bool small = argc > 1 && std::strcmp(argv[1], "--small") == 0;
  return small ? furlong::kda::cuda::run_small() : furlong::kda::cuda::run_all();
}
