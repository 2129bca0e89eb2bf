#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>

#include "app/commands.h"
#include "furlong/base/json.h"
#include "furlong/infer/machine.h"

namespace furlong::app {

namespace {

OrderedJson to_json(const MachineReport& report, const std::vector<ExactProbe>& probes) {
  OrderedJson exact;
  for (const ExactProbe& probe : probes) {
    exact[probe.dtype] = {{"rows_checked", probe.rows_checked}, {"rows_different", probe.rows_different}};
  }
  return {{"version", FURLONG_VERSION},
          {"cpu", report.cpu},
          {"cpu_features", report.cpu_features},
          {"simd", report.simd},
          {"libtorch", report.torch_version},
          {"cores", report.cores},
          {"threads", report.threads_asked},
          {"threads_run", report.threads_run},
          {"openmp_runtimes", report.openmp_runtimes},
          {"fp32_gflops", report.fp32_gflops},
          {"bf16_gflops", report.bf16_gflops},
          {"cuda", report.cuda},
          {"cuda_reason", report.cuda_reason},
          {"exact_mode", exact}};
}

void print(const MachineReport& report, const std::vector<ExactProbe>& probes) {
  const auto line = [](const char* what, const std::string& value) { fmt::print("{:<14} {}\n", what, value); };
  line("furlong", FURLONG_VERSION);
  line("cpu", fmt::format("{} ({})", report.cpu, fmt::join(report.cpu_features, " ")));
  line("simd kernels", report.simd);
  line("LibTorch", report.torch_version);
  line("threads",
       fmt::format("{} of {} cores; {} ran in a parallel loop{}", report.threads_asked, report.cores,
                   report.threads_run, report.threads_run < report.threads_asked ? " - FEWER than asked" : ""));
  line("OpenMP", fmt::format("{}{}", fmt::join(report.openmp_runtimes, ", "),
                             report.openmp_runtimes.size() == 1 ? "" : " - need exactly one"));
  line("fp32 products", fmt::format("{:.0f} GFLOP/s", report.fp32_gflops));
  line("bf16 products", fmt::format("{:.0f} GFLOP/s ({})", report.bf16_gflops,
                                    report.bf16_gflops > report.fp32_gflops ? "faster: train with compute = \"bf16\""
                                                                            : "slower: train with compute = \"fp32\""));
  line("CUDA", fmt::format("{}: {}", report.cuda ? "yes" : "no", report.cuda_reason));
  for (const ExactProbe& probe : probes) {
    line("exact mode", fmt::format("{}: {}", probe.dtype,
                                   probe.rows_different == 0
                                       ? fmt::format("holds, {} rows independent of their place", probe.rows_checked)
                                       : fmt::format("FAILS, {} of {} rows change with their place",
                                                     probe.rows_different, probe.rows_checked)));
  }
}

}  // namespace

void add_doctor(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("doctor", "What this machine will use and why");
  const auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "One JSON object");
  command->footer("Examples:\n  furlong doctor\n  furlong doctor --json");
  command->callback([json, &exit_code] {
    const MachineReport report = describe_machine();
    const std::vector<ExactProbe> probes = probe_exact_mode();
    if (*json) {
      fmt::print("{}\n", to_json(report, probes).dump(2));
    } else {
      print(report, probes);
    }
    for (const ExactProbe& probe : probes) {
      if (probe.rows_different > 0) exit_code = 1;
    }
    if (report.openmp_runtimes.size() != 1) exit_code = 1;
  });
}

}  // namespace furlong::app
