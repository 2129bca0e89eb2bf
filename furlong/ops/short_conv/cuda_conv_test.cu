// The CUDA convolution kernels against fp64 on the CPU; torch-free.
//
//   cuda_conv_test            one line a failure (VERBOSE=1: all); exit code 1 if a check fails, SKIP without a GPU
//   cuda_conv_test --small    one case of each kind of kernel, for compute-sanitizer
//   cuda_conv_test --time     also times N 8192, P 12288, W 4, bf16 beside a copy

#include <cstring>
#include <random>

#include "furlong/ops/common/cuda_test_support.h"
#include "furlong/ops/short_conv/cuda_conv.h"

namespace furlong::short_conv_detail {
namespace {

using test::check;
using test::DeviceBuffer;
using test::require_success;

struct Case {
  std::vector<int64_t> lengths;
  int64_t P, extra_rows;
  int W;
  bool bf16, tail;
  int64_t gap = 0;  // columns between rows of x and d_y
};

struct HostInputs {
  std::vector<int64_t> offsets{0};
  int64_t N, B, T;
  std::vector<float> x, weight, tail, d_y, d_tail;  // x and d_y [N, P], rows past the last sequence NaN
};

float rounded(float x, bool bf16) {
  return bf16 ? __bfloat162float(__float2bfloat16(x)) : x;
}

HostInputs make_inputs(const Case& c) {
  std::mt19937 engine(11);
  std::normal_distribution<float> normal;
  HostInputs in;
  for (const int64_t length : c.lengths) in.offsets.push_back(in.offsets.back() + length);
  in.B = static_cast<int64_t>(c.lengths.size()), in.T = c.W - 1, in.N = in.offsets.back() + c.extra_rows;
  const auto fill = [&](std::vector<float>& x, int64_t n, bool bf16) {
    x.resize(n);
    for (float& value : x) value = rounded(normal(engine), bf16);
  };
  fill(in.x, in.N * c.P, c.bf16), fill(in.d_y, in.N * c.P, c.bf16);
  std::fill(in.x.begin() + in.offsets.back() * c.P, in.x.end(), std::nanf(""));
  std::fill(in.d_y.begin() + in.offsets.back() * c.P, in.d_y.end(), std::nanf(""));
  fill(in.weight, c.P * c.W, false), fill(in.tail, in.B * in.T * c.P, c.bf16),
      fill(in.d_tail, in.B * in.T * c.P, c.bf16);
  return in;
}

struct Expected {
  std::vector<double> y, final_tail, d_x, d_weight, d_tail;
};

Expected reference(const Case& c, const HostInputs& in) {
  Expected r;
  const int64_t P = c.P, T = in.T;
  r.y.assign(in.N * P, 0), r.d_x.assign(in.N * P, 0), r.d_weight.assign(P * c.W, 0);
  r.final_tail.assign(in.B * T * P, 0), r.d_tail.assign(in.B * T * P, 0);
#pragma omp parallel for
  for (int64_t p = 0; p < P; ++p) {
    for (int64_t b = 0; b < in.B; ++b) {
      const int64_t start = in.offsets[b], length = c.lengths[b];
      std::vector<double> rows(T + length), d_rows(T + length, 0.0);
      for (int64_t i = 0; i < T + length; ++i) {
        rows[i] = i >= T ? in.x[(start + i - T) * P + p] : c.tail ? in.tail[(b * T + i) * P + p] : 0.0;
      }
      for (int64_t t = 0; t < length; ++t) {
        double u = 0;
        for (int j = 0; j < c.W; ++j) u += static_cast<double>(in.weight[p * c.W + j]) * rows[t + j];
        const double s = 1 / (1 + std::exp(-u)), d_u = in.d_y[(start + t) * P + p] * s * (1 + u * (1 - s));
        r.y[(start + t) * P + p] = u * s;
        for (int j = 0; j < c.W; ++j) {
          d_rows[t + j] += d_u * in.weight[p * c.W + j];
          r.d_weight[p * c.W + j] += d_u * rows[t + j];
        }
      }
      for (int64_t j = 0; j < T; ++j) {
        r.final_tail[(b * T + j) * P + p] = rows[length + j];
        d_rows[length + j] += in.d_tail[(b * T + j) * P + p];
      }
      for (int64_t i = 0; i < T + length; ++i) {
        (i < T ? r.d_tail[(b * T + i) * P + p] : r.d_x[(start + i - T) * P + p]) = d_rows[i];
      }
    }
  }
  return r;
}

struct Device {
  DeviceBuffer x, d_y, weight, tail, d_tail, offsets, y, final_tail, d_x, d_initial, d_weight, workspace;
  ConvForwardLaunch forward;
  ConvBackwardLaunch backward;

  Device(const Case& c, const HostInputs& in) {
    const int64_t stride = c.P + c.gap;
    const auto spread = [&](DeviceBuffer& buffer, const std::vector<float>& rows) {
      std::vector<float> wide(in.N * stride, std::nanf(""));
      for (int64_t n = 0; n < in.N; ++n) std::copy_n(rows.begin() + n * c.P, c.P, wide.begin() + n * stride);
      buffer.upload(wide, c.bf16);
    };
    spread(x, in.x), spread(d_y, in.d_y);
    weight.upload(in.weight, false), tail.upload(in.tail, c.bf16), d_tail.upload(in.d_tail, c.bf16);
    offsets.upload_bytes(in.offsets.data(), in.offsets.size() * sizeof(int64_t));
    const std::vector<float> rows(in.N * c.P, std::nanf("")), tails(in.B * in.T * c.P, std::nanf(""));
    y.upload(rows, c.bf16), d_x.upload(rows, c.bf16), final_tail.upload(tails, c.bf16);
    d_initial.upload(in.d_tail, c.bf16);  // what the glue does: empty sequences pass their gradient through
    d_weight.upload(std::vector<float>(c.P * c.W, std::nanf("")), false);
    const ConvShape shape{in.N, in.B, c.P, c.W, c.bf16, static_cast<const int64_t*>(offsets.data())};
    workspace.upload(std::vector<float>(conv_backward_workspace(shape), std::nanf("")), false);
    const auto* w = static_cast<const float*>(weight.data());
    forward = {shape, x.data(), stride, w, c.tail ? tail.data() : nullptr, y.data(), final_tail.data()};
    backward = {shape,
                x.data(),
                stride,
                d_y.data(),
                stride,
                w,
                forward.initial_tail,
                d_tail.data(),
                d_x.data(),
                d_initial.data(),
                static_cast<float*>(d_weight.data()),
                static_cast<float*>(workspace.data())};
  }
  void run() {
    require_success(launch_conv_forward(forward, nullptr), "launch_conv_forward");
    require_success(launch_conv_backward(backward, nullptr), "launch_conv_backward");
    require_success(cudaDeviceSynchronize(), "convolution kernels");
  }
  bool guards_hold() const {
    for (const DeviceBuffer* b : {&x, &d_y, &tail, &y, &final_tail, &d_x, &d_initial, &d_weight, &workspace}) {
      if (!b->guards_hold()) return false;
    }
    return true;
  }
};

void compare(const Case& c) {
  const HostInputs in = make_inputs(c);
  Device device(c, in);
  device.run();
  const Expected expected = reference(c, in);
  char name[96];
  std::snprintf(name, sizeof name, "B %d N %d P %d W %d %s%s%s", static_cast<int>(in.B), static_cast<int>(in.N),
                static_cast<int>(c.P), c.W, c.bf16 ? "bf16" : "fp32", c.tail ? " tail" : "", c.gap > 0 ? " gap" : "");
  // fp32: a handful of terms, d_weight as many as rows.
  const double tolerance = c.bf16 ? test::kBf16Rounding : 2e-6;
  const auto compare_one = [&](const char* what, const DeviceBuffer& got, bool bf16, const std::vector<double>& want,
                               double limit) {
    const double error = test::relative_error(got.download(bf16), want);
    check(std::string(name) + ": " + what, error <= limit, error);
  };
  compare_one("y", device.y, c.bf16, expected.y, tolerance);
  compare_one("final_tail", device.final_tail, c.bf16, expected.final_tail, 0);
  compare_one("d_x", device.d_x, c.bf16, expected.d_x, tolerance);
  compare_one("d_weight", device.d_weight, false, expected.d_weight, 5e-6);
  compare_one("d_initial_tail", device.d_initial, c.bf16, expected.d_tail, tolerance);
  check(std::string(name) + ": guard zones", device.guards_hold(), 0);
}

/// The step on a pool that is a view of wider rows: bits of the whole sequence, neighbours untouched.
void step_equals_whole(bool bf16, int W, int64_t P) {
  const Case c{{6, 6}, P, 0, W, bf16, true};
  const HostInputs in = make_inputs(c);
  Device device(c, in);
  device.run();
  const auto y = device.y.download(bf16), final_tail = device.final_tail.download(bf16);
  const int64_t slots = 5, wide = 3 * P, T = in.T;
  std::vector<float> pool(slots * T * wide, 7.0f);
  const std::vector<int64_t> slot{3, 1};
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t j = 0; j < T; ++j) {
      std::copy_n(in.tail.begin() + (b * T + j) * P, P, pool.begin() + (slot[b] * T + j) * wide + P);
    }
  }
  DeviceBuffer pool_buffer, slot_buffer, x, out;
  pool_buffer.upload(pool, bf16), slot_buffer.upload_bytes(slot.data(), 16);
  bool same = true;
  for (int64_t t = 0; t < 6; ++t) {
    std::vector<float> token(2 * P);
    for (int64_t b = 0; b < 2; ++b) std::copy_n(in.x.begin() + (b * 6 + t) * P, P, token.begin() + b * P);
    x.upload(token, bf16), out.upload(std::vector<float>(2 * P, std::nanf("")), bf16);
    const int64_t size = bf16 ? 2 : 4;
    const ConvStepLaunch launch{{2, 2, P, W, bf16, nullptr},
                                x.data(),
                                P,
                                static_cast<const float*>(device.weight.data()),
                                static_cast<char*>(pool_buffer.data()) + P * size,
                                slots,
                                T * wide,
                                wide,
                                static_cast<const int64_t*>(slot_buffer.data()),
                                out.data()};
    require_success(launch_conv_step(launch, nullptr), "launch_conv_step");
    require_success(cudaDeviceSynchronize(), "step kernel");
    const auto got = out.download(bf16);
    for (int64_t b = 0; b < 2; ++b) {
      same = same && std::equal(got.begin() + b * P, got.begin() + (b + 1) * P, y.begin() + (b * 6 + t) * P);
    }
  }
  const auto after = pool_buffer.download(bf16);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t j = 0; j < T; ++j) {
      std::copy_n(final_tail.begin() + (b * T + j) * P, P, pool.begin() + (slot[b] * T + j) * wide + P);
    }
  }
  check("step gives the bits of the whole sequence", same, 0);
  check("step leaves the final tail and nothing else", after == pool, 0);
}

void repeats() {
  const Case c{{300, 5, 1}, 200, 3, 4, true, true};
  const HostInputs in = make_inputs(c);
  Device first(c, in);
  first.run();
  bool same = true;
  for (int i = 0; i < 50; ++i) {
    Device again(c, in);
    again.run();
    same = same && again.y.download(true) == first.y.download(true) &&
           again.d_x.download(true) == first.d_x.download(true) &&
           again.final_tail.download(true) == first.final_tail.download(true) &&
           again.d_initial.download(true) == first.d_initial.download(true) &&
           again.d_weight.download(false) == first.d_weight.download(false);
  }
  check("50 repeats give the same bits", same, 0);
}

/// Each sequence of a pack as a pack of its own.
void neighbours() {
  const Case c{{1, 70, 0, 300, 33}, 132, 0, 4, true, true};
  const HostInputs in = make_inputs(c);
  Device pack(c, in);
  pack.run();
  const auto y = pack.y.download(true), d_x = pack.d_x.download(true), tail = pack.final_tail.download(true),
             d_initial = pack.d_initial.download(true);
  bool same = true;
  for (int64_t b = 0; b < in.B; ++b) {
    Case alone = c;
    alone.lengths = {c.lengths[b]};
    HostInputs part = in;
    const auto cut = [&](std::vector<float>& x, int64_t first, int64_t last, int64_t row) {
      x = std::vector<float>(x.begin() + first * row, x.begin() + last * row);
    };
    for (auto* x : {&part.x, &part.d_y}) cut(*x, in.offsets[b], in.offsets[b + 1], c.P);
    for (auto* x : {&part.tail, &part.d_tail}) cut(*x, b, b + 1, in.T * c.P);
    part.offsets = {0, c.lengths[b]}, part.N = c.lengths[b], part.B = 1;
    Device device(alone, part);
    device.run();
    const auto matches = [&](const DeviceBuffer& one, const std::vector<float>& all, int64_t from) {
      const auto got = one.download(true);
      return std::equal(got.begin(), got.end(), all.begin() + from);
    };
    same = same && matches(device.y, y, in.offsets[b] * c.P) && matches(device.d_x, d_x, in.offsets[b] * c.P) &&
           matches(device.final_tail, tail, b * in.T * c.P) && matches(device.d_initial, d_initial, b * in.T * c.P);
  }
  check("a sequence alone gives the same bits as among others", same, 0);
}

template <typename Body>
double median_ms(const Body& body) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin), cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < 23; ++i) {
    cudaEventRecord(begin);
    body();
    cudaEventRecord(end);
    require_success(cudaEventSynchronize(end), "timing");
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 3) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void time_kernels() {
  const int64_t N = 8192, P = 12288;
  const Case c{{N}, 16, 0, 4, true, false};
  HostInputs in = make_inputs(c);
  Device device(c, in);  // offsets
  std::vector<char*> buffers;
  for (int i = 0; i < 4; ++i) {
    char* p = nullptr;
    require_success(cudaMalloc(reinterpret_cast<void**>(&p), N * P * 2), "cudaMalloc");
    std::vector<__nv_bfloat16> values(N * P);
    for (int64_t j = 0; j < N * P; ++j)
      values[j] = __float2bfloat16(static_cast<float>((j * 2654435761u >> 8) % 2001) / 1000 - 1);
    require_success(cudaMemcpy(p, values.data(), N * P * 2, cudaMemcpyHostToDevice), "upload");
    buffers.push_back(p);
  }
  const ConvShape shape{N, 1, P, 4, true, device.forward.shape.offsets};
  DeviceBuffer weight, tails, workspace, d_weight;
  weight.upload(std::vector<float>(P * 4, 0.3f), false), tails.upload(std::vector<float>(3 * P, 0), true);
  workspace.upload(std::vector<float>(conv_backward_workspace(shape)), false),
      d_weight.upload(std::vector<float>(P * 4), false);
  const auto* w = static_cast<const float*>(weight.data());
  const ConvForwardLaunch forward{shape, buffers[0], P, w, nullptr, buffers[1], tails.data()};
  const ConvBackwardLaunch backward{shape,
                                    buffers[0],
                                    P,
                                    buffers[2],
                                    P,
                                    w,
                                    nullptr,
                                    nullptr,
                                    buffers[3],
                                    tails.data(),
                                    static_cast<float*>(d_weight.data()),
                                    static_cast<float*>(workspace.data())};
  const double bytes = static_cast<double>(N * P) * 2;
  const double copy = median_ms([&] { cudaMemcpyAsync(buffers[1], buffers[0], N * P * 2, cudaMemcpyDeviceToDevice); });
  const double f = median_ms([&] { launch_conv_forward(forward, nullptr); });
  const double g = median_ms([&] { launch_conv_backward(backward, nullptr); });
  std::printf("copy %.4f ms (%.2f TB/s)  forward %.4f ms (%.2f TB/s)  gradient %.4f ms (%.2f TB/s)\n", copy,
              2 * bytes / copy / 1e9, f, 2 * bytes / f / 1e9, g, 3 * bytes / g / 1e9);
  for (char* p : buffers) cudaFree(p);
}

int run_small() {
  for (const bool bf16 : {false, true}) {
    for (const int W : {1, 4, 16}) compare({{7, 1, 0, 2, 70}, 70, 3, W, bf16, true, 8});
    compare({{130}, 192, 0, 4, bf16, false});
    step_equals_whole(bf16, 4, 40);
  }
  return test::summary();
}

int run(bool timed) {
  for (const bool bf16 : {false, true}) {
    for (const int W : {1, 2, 3, 4, 5, 9, 16}) {
      compare({{7, 1, 0, 2, 150}, 70, 3, W, bf16, true});
      compare({{7, 1, 0, 2, 150}, 192, 0, W, bf16, false, 8});
    }
    for (int64_t n = 1; n <= 130; ++n) compare({{n}, 16, 1, 4, bf16, true});
    compare({{31, 1, 1, 1, 30, 64, 0, 0, 33, 2, 3, 500, 1, 128}, 132, 5, 4, bf16, true, 4});
    compare({{255, 256, 257, 1000, 4096}, 24, 1, 4, bf16, true});
    compare({{65536}, 16, 1, 4, bf16, true});
    compare({{0, 0}, 16, 2, 4, bf16, true});
    compare({{}, 16, 2, 4, bf16, true});
    step_equals_whole(bf16, 4, 40);
    step_equals_whole(bf16, 7, 33);
    step_equals_whole(bf16, 1, 16);
  }
  repeats();
  neighbours();
  if (timed) time_kernels();
  return test::summary();
}

}  // namespace
}  // namespace furlong::short_conv_detail

int main(int argc, char** argv) {
  if (!furlong::test::has_gpu()) return 0;
  const std::string option = argc > 1 ? argv[1] : "";
  return option == "--small" ? furlong::short_conv_detail::run_small()
                             : furlong::short_conv_detail::run(option == "--time");
}
