#include "furlong/infer/machine.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <sched.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "furlong/base/clock.h"
#include "furlong/base/parallel.h"
#include "furlong/ops/common/linear.h"
#include "furlong/ops/common/simd_target.h"

namespace furlong {

namespace {

constexpr std::array kFeatures = {"avx2",     "fma",      "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile",
                                  "amx_bf16", "amx_int8", "asimd",   "bf16",        "sve"};

/// The value of the first "key : value" line of /proc/cpuinfo; "" where there is none.
std::string cpuinfo(const std::vector<std::string>& keys) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string key = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) return line.substr(std::min(colon + 2, line.size()));
  }
  return "";
}

std::vector<std::string> cpu_features() {
  std::istringstream words(cpuinfo({"flags", "Features"}));
  std::vector<std::string> found;
  for (std::string word; words >> word;) {
    if (std::find(kFeatures.begin(), kFeatures.end(), word) != kFeatures.end()) found.push_back(word);
  }
  return found;
}

int64_t usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : std::thread::hardware_concurrency();
}

/// Best of three, after a warm-up that packs weights and wakes the threads.
double product_gflops(at::ScalarType dtype) {
  constexpr int64_t kRows = 512, kWidth = 1024;
  const at::Tensor x = at::randn({kRows, kWidth}).to(dtype), weight = at::randn({kWidth, kWidth}).to(dtype);
  linear(x, weight, Numerics::kFast);
  double best = 0.0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const Stopwatch watch;
    linear(x, weight, Numerics::kFast);
    best = std::max(best, 2.0 * kRows * kWidth * kWidth / watch.seconds() / 1e9);
  }
  return best;
}

}  // namespace

std::vector<std::string> loaded_openmp_runtimes() {
  std::set<std::string> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t slash = line.find('/');
    if (slash == std::string::npos) continue;
    const std::string path = line.substr(slash), file = path.substr(path.rfind('/') + 1);
    for (const char* stem : {"libgomp", "libiomp5", "libomp"}) {
      if (file.rfind(stem, 0) == 0 && file.find(".so") != std::string::npos) found.insert(path);
    }
  }
  return {found.begin(), found.end()};
}

int64_t count_running_threads() {
  std::vector<std::thread::id> ids(num_threads());
  // Each range notes its thread; a thread that ran two ranges counts once.
  parallel_for(0, static_cast<int64_t>(ids.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) ids[i] = std::this_thread::get_id();
  });
  return static_cast<int64_t>(std::set<std::thread::id>(ids.begin(), ids.end()).size());
}

MachineReport describe_machine() {
  const at::NoGradGuard no_grad;
  MachineReport report;
  report.cpu = cpuinfo({"model name", "Processor"});
  report.cpu_features = cpu_features();
  report.simd = simd_target();
  report.torch_version = TORCH_VERSION;
  report.cores = usable_cores();
  report.threads_asked = at::get_num_threads();
  report.threads_run = count_running_threads();
  report.openmp_runtimes = loaded_openmp_runtimes();
  report.fp32_gflops = product_gflops(at::kFloat);
  report.bf16_gflops = product_gflops(at::kBFloat16);
  report.cuda = at::hasCUDA() && at::detail::getCUDAHooks().deviceCount() > 0;
  report.cuda_reason = !at::hasCUDA() ? "this program was built without it (cmake preset cuda)"
                       : report.cuda  ? "in use where a command says --device cuda"
                                      : "the libraries are linked, but there is no GPU or driver";
  return report;
}

std::vector<ExactProbe> probe_exact_mode() {
  const at::NoGradGuard no_grad;
  constexpr int64_t kRows = 3 * kExactRows, kShift = 17;
  std::vector<ExactProbe> probes;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    ExactProbe probe{.dtype = dtype == at::kFloat ? "fp32" : "bf16"};
    for (const auto& [in, out] : {std::pair<int64_t, int64_t>{192, 256}, {768, 512}, {1000, 96}}) {
      const at::Tensor x = at::randn({kRows, in}).to(dtype), weight = at::randn({out, in}).to(dtype);
      const at::Tensor together = linear(x, weight, Numerics::kExact);
      // The same rows at other places with other neighbours: shifted by a number that is coprime to the block.
      const at::Tensor shifted = linear(x.roll({kShift}, {0}), weight, Numerics::kExact).roll({-kShift}, {0});
      const at::Tensor alone = linear(x.slice(0, 0, 1), weight, Numerics::kExact);
      probe.rows_checked += kRows + 1;
      probe.rows_different += together.ne(shifted).any(1).sum().item<int64_t>();
      probe.rows_different += together.slice(0, 0, 1).ne(alone).any().item<bool>() ? 1 : 0;
    }
    probes.push_back(probe);
  }
  return probes;
}

}  // namespace furlong
