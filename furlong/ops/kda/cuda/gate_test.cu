// The CUDA gates and their gradients against fp64 on the CPU; torch-free. SKIP without a GPU.

#include <random>

#include "furlong/ops/common/cuda_test_support.h"
#include "furlong/ops/kda/cuda/gate.h"

namespace furlong::kda::cuda {
namespace {

using test::check;
using test::DeviceBuffer;
using test::require_success;

void compare(int64_t N, int64_t H, int64_t K, bool bf16, GateForm form, float spread, int repeats = 0) {
  std::mt19937 engine(5);
  std::normal_distribution<float> normal;
  const int64_t P = H * K;
  std::vector<float> z(N * P), d(N * P), a_log(H), bias(P);
  for (float& x : z) x = __bfloat162float(__float2bfloat16(spread * normal(engine)));
  for (auto* values : {&d, &a_log, &bias}) {
    for (float& x : *values) x = normal(engine);
  }
  std::vector<double> g(N * P), d_z(N * P), d_a(H, 0), d_bias(P, 0);
  for (int64_t i = 0; i < N * P; ++i) {
    const int64_t p = i % P, h = p / K;
    const double a = std::exp(static_cast<double>(a_log[h])), x = static_cast<double>(z[i]) + bias[p];
    const double s = 1 / (1 + std::exp(-(form == GateForm::kBounded ? a * x : x)));
    g[i] = form == GateForm::kBounded ? -5 * s : -a * (x > 20 ? x : std::log1p(std::exp(x)));
    d_z[i] = form == GateForm::kBounded ? d[i] * -5 * s * (1 - s) * a : -a * s * d[i];
    d_bias[p] += d_z[i];
    d_a[h] += form == GateForm::kBounded ? d_z[i] * x : d[i] * g[i];
  }
  DeviceBuffer z_buffer, d_buffer, a_buffer, bias_buffer, g_buffer, dz_buffer, da_buffer, db_buffer, workspace;
  z_buffer.upload(z, bf16), d_buffer.upload(d, false), a_buffer.upload(a_log, false), bias_buffer.upload(bias, false);
  const std::vector<float> unset(N * P, std::nanf(""));
  g_buffer.upload(unset, false), dz_buffer.upload(unset, bf16);
  da_buffer.upload(std::vector<float>(H, std::nanf("")), false),
      db_buffer.upload(std::vector<float>(P, std::nanf("")), false);
  const GateArgs args{N,
                      H,
                      K,
                      bf16 ? Element::kBFloat16 : Element::kFloat,
                      z_buffer.data(),
                      static_cast<float*>(a_buffer.data()),
                      static_cast<float*>(bias_buffer.data()),
                      form};
  workspace.upload(std::vector<float>(gate_backward_workspace(args), std::nanf("")), false);
  const auto run_both = [&] {
    require_success(launch_gate(args, static_cast<float*>(g_buffer.data())), "launch_gate");
    require_success(
        launch_gate_backward(
            args, {static_cast<float*>(d_buffer.data()), dz_buffer.data(), static_cast<float*>(da_buffer.data()),
                   static_cast<float*>(db_buffer.data()), static_cast<float*>(workspace.data())}),
        "launch_gate_backward");
    require_success(cudaDeviceSynchronize(), "gate kernels");
    return std::vector{g_buffer.download(false), dz_buffer.download(bf16), da_buffer.download(false),
                       db_buffer.download(false)};
  };
  const auto first = run_both();
  bool same = true;
  for (int i = 0; i < repeats; ++i) same = same && run_both() == first;
  char name[96];
  std::snprintf(name, sizeof name, "N %d H %d K %d %s %s spread %g", static_cast<int>(N), static_cast<int>(H),
                static_cast<int>(K), bf16 ? "bf16" : "fp32", form == GateForm::kBounded ? "bounded" : "softplus",
                spread);
  const auto one = [&](const char* what, const DeviceBuffer& got, bool narrow, const std::vector<double>& want,
                       double limit) {
    const double error = test::relative_error(got.download(narrow), want);
    check(std::string(name) + ": " + what, error <= limit, error);
    check(std::string(name) + ": guard zones of " + what, got.guards_hold(), 0);
  };
  check(std::string(name) + ": repeats give the same bits", same, repeats);
  one("decay_log", g_buffer, false, g, 1e-6);
  one("d_z", dz_buffer, bf16, d_z, bf16 ? test::kBf16Rounding : 2e-6);
  one("d_a_log", da_buffer, false, d_a, 1e-5);
  one("d_dt_bias", db_buffer, false, d_bias, 5e-6);
}

int run() {
  for (const GateForm form : {GateForm::kBounded, GateForm::kSoftplus}) {
    for (const bool bf16 : {false, true}) {
      compare(1, 1, 1, bf16, form, 1);
      compare(37, 3, 50, bf16, form, 1);
      compare(300, 4, 128, bf16, form, 1, 50);
      compare(130, 5, 64, bf16, form, 30);
    }
  }
  return test::summary();
}

}  // namespace
}  // namespace furlong::kda::cuda

int main() {
  if (!furlong::test::has_gpu()) return 0;
  return furlong::kda::cuda::run();
}
