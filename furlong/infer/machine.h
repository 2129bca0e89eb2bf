#pragma once

// What this machine will use and why: facts and short measurements for `furlong doctor`.

#include <cstdint>
#include <string>
#include <vector>

namespace furlong {

struct MachineReport {
  std::string cpu;                        // model name
  std::vector<std::string> cpu_features;  // of those that matter here
  std::string simd;                       // target of our kernels
  std::string torch_version;
  int64_t cores = 0;                         // that this process may use
  int64_t threads_asked = 0;                 // of the thread pool
  int64_t threads_run = 0;                   // counted in a parallel loop
  std::vector<std::string> openmp_runtimes;  // libraries loaded; more than one: two pools fight for the cores
  double fp32_gflops = 0;                    // a product of 512 x 1024 by 1024 x 1024
  double bf16_gflops = 0;
  bool cuda = false;
  std::string cuda_reason;
};

MachineReport describe_machine();

/// Paths of the OpenMP runtimes mapped into this process.
std::vector<std::string> loaded_openmp_runtimes();
/// Distinct threads that worked in one parallel loop.
int64_t count_running_threads();

struct ExactProbe {
  std::string dtype;
  int64_t rows_checked = 0;
  int64_t rows_different = 0;  // rows whose product changed its bits with their place or their neighbours
};

/// Is a row's product independent of its place in a block and of its neighbours, in exact mode? fp32 and bf16.
std::vector<ExactProbe> probe_exact_mode();

}  // namespace furlong
