// golden_test --dir FOLDER [--device cpu|cuda]: runs every golden case below FOLDER and compares it with its
// tolerances.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "tests/support/golden.h"

namespace {

namespace fs = std::filesystem;
using furlong::golden::Case;

/// Folders that hold a case.json, in the order of their names.
std::vector<fs::path> find_cases(const fs::path& folder) {
  std::vector<fs::path> cases;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().filename() == "case.json") cases.push_back(entry.path().parent_path());
  }
  std::sort(cases.begin(), cases.end());
  return cases;
}

struct Tally {
  int passed = 0;
  int failed = 0;
  int unknown = 0;
  std::set<std::string> unknown_kinds;
};

/// Error as a share of what is allowed; exact checks that fail count as infinite.
double share(const Case::Check& check) {
  if (check.passed && check.tolerance <= 0.0) return 0.0;
  if (std::isnan(check.error) || check.tolerance <= 0.0) return INFINITY;
  return check.error / check.tolerance;
}

bool report(const std::string& name, const std::string& kind, const std::vector<Case::Check>& checks) {
  const bool passed =
      !checks.empty() && std::all_of(checks.begin(), checks.end(), [](const auto& c) { return c.passed; });
  std::string worst = "no check was made";
  if (!checks.empty()) {
    const auto check = std::max_element(checks.begin(), checks.end(),
                                        [](const auto& a, const auto& b) { return share(a) < share(b); });
    char text[96];
    std::snprintf(text, sizeof(text), "worst error %.2e, tolerance %.2e, ", check->error, check->tolerance);
    worst = text + check->what + ", " + std::to_string(checks.size()) + " checks";
  }
  std::printf("%-6s %s [%s]: %s\n", passed ? "ok" : "FAILED", name.c_str(), kind.c_str(), worst.c_str());
  for (const auto& check : checks) {
    if (check.passed) continue;
    std::printf("         %s: error %.3e, tolerance %.3e%s%s\n", check.what.c_str(), check.error, check.tolerance,
                check.detail.empty() ? "" : ": ", check.detail.c_str());
  }
  return passed;
}

void run_case(const fs::path& folder, const std::string& name, at::Device device, Tally* tally) {
  std::string kind = "?";
  try {
    Case golden(folder, device);
    kind = golden.kind();
    const auto runner = furlong::golden::runners().find(kind);
    if (runner == furlong::golden::runners().end()) {
      std::printf("%-6s %s [%s]\n", "?", name.c_str(), kind.c_str());
      tally->unknown_kinds.insert(kind);
      ++tally->unknown;
      return;
    }
    runner->second(golden);
    ++(report(name, kind, golden.checks()) ? tally->passed : tally->failed);
  } catch (const std::exception& error) {
    std::printf("%-6s %s [%s]: %s\n", "FAILED", name.c_str(), kind.c_str(), error.what());
    ++tally->failed;
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string folder;
  std::string device = "cpu";
  CLI::App app("Runs golden cases and compares them with their tolerances.");
  app.add_option("--dir", folder, "folder searched for case.json")->required()->check(CLI::ExistingDirectory);
  app.add_option("--device", device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  CLI11_PARSE(app, argc, argv);

  Tally tally;
  for (const fs::path& found : find_cases(folder)) {
    run_case(found, fs::relative(found, folder).string(), at::Device(device), &tally);
  }
  if (!tally.unknown_kinds.empty()) {
    std::printf("unknown kinds:");
    for (const std::string& kind : tally.unknown_kinds) std::printf(" %s", kind.c_str());
    std::printf("\n");
  }
  std::printf("%d passed, %d failed, %d unknown\n", tally.passed, tally.failed, tally.unknown);
  return tally.failed > 0 || tally.passed == 0 ? 1 : 0;
}
