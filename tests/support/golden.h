#pragma once

// Golden-vector cases: a folder with case.json and tensors.safetensors. Each file of tests/golden/*.cpp registers the
// runner of some kinds; golden_test finds the cases by the `kind` of their case.json.

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "furlong/base/json.h"

namespace furlong::golden {

class Case {
 public:
  explicit Case(const std::filesystem::path& folder, at::Device device = at::kCPU);

  const Json& info() const { return info_; }
  std::string kind() const;
  const std::filesystem::path& folder() const { return folder_; }  // for files beside case.json
  at::Device device() const { return device_; }
  bool has(const std::string& name) const { return tensors_.count(name) > 0; }
  const at::Tensor& tensor(const std::string& name) const;  // FormatError when missing
  at::Tensor f32(const std::string& name) const;            // the same, as fp32
  std::vector<std::string> names() const;                   // of all tensors
  /// A number of case.json's "tolerance" table. FormatError when missing.
  double tolerance(const std::string& key) const;

  /// max|got - expected| <= tolerance * max|expected|, recorded under `what`. Shapes must agree up to leading ones.
  void expect_close(const std::string& what, const at::Tensor& got, const at::Tensor& expected, double tolerance);
  /// For measures of the caller's own: error <= tolerance.
  void expect_below(const std::string& what, double error, double tolerance);
  void expect(const std::string& what, bool holds, const std::string& detail = "");

  struct Check {
    std::string what;
    double error = 0.0;  // relative
    double tolerance = 0.0;
    bool passed = false;
    std::string detail;
  };
  const std::vector<Check>& checks() const { return checks_; }

 private:
  std::filesystem::path folder_;
  at::Device device_;
  Json info_;
  std::map<std::string, at::Tensor> tensors_;
  std::vector<Check> checks_;
};

using Runner = std::function<void(Case&)>;
std::map<std::string, Runner>& runners();

struct Registration {
  Registration(const std::string& kind, Runner runner) { runners()[kind] = std::move(runner); }
};

}  // namespace furlong::golden

/// FURLONG_GOLDEN("kda_op", run_kda_op) at namespace scope.
#define FURLONG_GOLDEN_CONCAT_(a, b) a##b
#define FURLONG_GOLDEN_NAME_(line) FURLONG_GOLDEN_CONCAT_(golden_registration_, line)
#define FURLONG_GOLDEN(kind, runner) \
  static const ::furlong::golden::Registration FURLONG_GOLDEN_NAME_(__LINE__)(kind, runner)
