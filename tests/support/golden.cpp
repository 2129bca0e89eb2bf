#include "tests/support/golden.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "furlong/base/error.h"
#include "furlong/base/shape.h"
#include "furlong/checkpoint/named_tensors.h"

namespace furlong::golden {

namespace {

/// Sizes without leading ones.
at::IntArrayRef significant(at::IntArrayRef sizes) {
  while (!sizes.empty() && sizes.front() == 1) sizes = sizes.slice(1);
  return sizes;
}

double largest(const at::Tensor& values) {
  return values.numel() == 0 ? 0.0 : values.max().item<double>();
}

/// max|got - expected| / max|expected|, both fp64; absolute where nothing but zeros is expected. Infinities and NaNs
/// must stand where they are expected, and add nothing then.
double relative_error(const at::Tensor& got, const at::Tensor& expected) {
  const at::Tensor same = got.eq(expected).logical_or(at::isnan(got).logical_and(at::isnan(expected)));
  const at::Tensor zero = at::zeros_like(got);
  const double error = largest(at::where(same, zero, got.sub(expected).abs()));
  const double scale = largest(at::where(at::isfinite(expected), expected.abs(), zero));
  return scale > 0.0 ? error / scale : error;
}

}  // namespace

Case::Case(const std::filesystem::path& folder, at::Device device) : folder_(folder), device_(device) {
  info_ = read_json(folder / "case.json");
  if (!info_.is_object()) throw FormatError((folder / "case.json").string() + ": must hold an object");
  const std::filesystem::path file = folder / "tensors.safetensors";
  const Json listed = info_.value("tensors", Json::object());
  // Cases of tokenizers and prompts hold text files alone.
  if (listed.empty() && !std::filesystem::exists(file)) return;
  const CheckpointReader reader(file);
  for (const std::string& name : reader.names()) tensors_[name] = reader.tensor(name).to(device);
  for (const auto& [name, description] : listed.items()) tensor(name);  // throws when missing
}

std::string Case::kind() const {
  const auto kind = info_.find("kind");
  if (kind == info_.end() || !kind->is_string()) {
    throw FormatError((folder_ / "case.json").string() + ": has no 'kind'");
  }
  return kind->get<std::string>();
}

const at::Tensor& Case::tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw FormatError(folder_.string() + ": there is no tensor '" + name + "'");
  return found->second;
}

at::Tensor Case::f32(const std::string& name) const {
  return tensor(name).to(at::kFloat);
}

std::vector<std::string> Case::names() const {
  std::vector<std::string> result;
  for (const auto& [name, tensor] : tensors_) result.push_back(name);
  return result;
}

double Case::tolerance(const std::string& key) const {
  const auto table = info_.find("tolerance");
  if (table != info_.end() && table->is_object() && table->contains(key) && table->at(key).is_number()) {
    return table->at(key).get<double>();
  }
  throw FormatError((folder_ / "case.json").string() + ": 'tolerance' has no number '" + key + "'");
}

void Case::expect_close(const std::string& what, const at::Tensor& got, const at::Tensor& expected, double tolerance) {
  Check check;
  check.what = what;
  check.tolerance = tolerance;
  if (!got.defined() || significant(got.sizes()) != significant(expected.sizes())) {
    check.detail =
        "shape " + (got.defined() ? shape_text(got.sizes()) : "none") + ", expected " + shape_text(expected.sizes());
  } else {
    const at::Tensor expected_f64 = expected.detach().to(at::kCPU, at::kDouble);
    check.error = relative_error(got.detach().to(at::kCPU, at::kDouble).reshape(expected.sizes()), expected_f64);
    check.passed = check.error <= tolerance;  // false for NaN
  }
  checks_.push_back(std::move(check));
}

void Case::expect_below(const std::string& what, double error, double tolerance) {
  checks_.push_back({what, error, tolerance, error <= tolerance, ""});
}

void Case::expect(const std::string& what, bool holds, const std::string& detail) {
  checks_.push_back({what, 0.0, 0.0, holds, detail});
}

std::map<std::string, Runner>& runners() {
  static std::map<std::string, Runner> all;
  return all;
}

}  // namespace furlong::golden
