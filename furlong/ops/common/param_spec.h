#pragma once

// What a layer says of each of its parameters, once: initialisation, loading and saving, optimizer groups and counting
// all walk the same list.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace furlong {

enum class DtypePolicy {
  kCompute,  // fp32 master when training; stored in the compute dtype when serving
  kFp32,     // fp32 always: gates, biases, A_log, dt_bias, convolutions, router, KDA output norm
};

enum class OptimizerRule {
  kAdamW,
  kMuon,    // orthogonalised in muon_blocks equal row blocks (heads, experts), each on its own
  kFrozen,  // set by a rule of its own (the router's correction bias): no gradient, no optimizer state
};

struct Init {
  enum class Kind { kNormal, kTruncatedNormal, kUniform, kLogUniform, kConstant };
  Kind kind = Kind::kNormal;
  double a = 0.02;  // normal: std; truncated normal: std, cut at 3 std; (log-)uniform: low end; constant: the value
  double b = 0.0;   // (log-)uniform: high end. kLogUniform draws log(U(a, b)).

  static Init normal(double std) { return {Kind::kNormal, std, 0}; }
  static Init truncated_normal(double std) { return {Kind::kTruncatedNormal, std, 0}; }
  static Init uniform(double low, double high) { return {Kind::kUniform, low, high}; }
  static Init log_of_uniform(double low, double high) { return {Kind::kLogUniform, low, high}; }
  static Init constant(double value) { return {Kind::kConstant, value, 0}; }
};

struct ParamSpec {
  std::string name;            // published name below the layer's prefix, "self_attn.q_proj.weight"; a stacked
                               // tensor has "{}" where the published name has the index: "experts.{}.w1.weight"
  std::vector<int64_t> shape;  // as held in memory; a stacked tensor has the index as its first dimension
  DtypePolicy dtype = DtypePolicy::kCompute;
  OptimizerRule rule = OptimizerRule::kAdamW;
  int64_t muon_blocks = 1;
  bool weight_decay = true;
  Init init = {};
  std::vector<int64_t> published_shape = {};  // if it differs from `shape` (without the stacked dimension)
  bool routed_expert = false;                 // counted as active for k of E experts only

  bool stacked() const { return name.find("{}") != std::string::npos; }
  int64_t numel() const {
    int64_t product = 1;
    for (const int64_t size : shape) product *= size;
    return product;
  }
};

/// A parameter of a built model: its description and the place that holds its tensor. Layers that are only counted or
/// planned never get a tensor.
struct Param {
  ParamSpec spec;  // spec.name is complete
  at::Tensor* tensor;
};

/// Collects parameters; layers call add() in a fixed order.
class ParamList {
 public:
  void add(const std::string& prefix, ParamSpec spec, at::Tensor* tensor) {
    spec.name = prefix + spec.name;
    params_.push_back({std::move(spec), tensor});
  }
  const std::vector<Param>& params() const { return params_; }

 private:
  std::vector<Param> params_;
};

}  // namespace furlong
