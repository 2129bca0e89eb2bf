#pragma once

// Optimizers over fp32 master parameters. One optimizer object holds every group; each parameter's rule comes from its
// ParamSpec: Muon for matrices (in row blocks: heads, experts), AdamW for the rest, none for frozen ones.

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "furlong/ops/common/param_spec.h"

namespace furlong {

struct AdamWConfig {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("beta1", beta1, {.doc = "decay of the first moment", .min = 0.0, .max = 0.9999999});
    visit("beta2", beta2, {.doc = "decay of the second moment", .min = 0.0, .max = 0.9999999});
    visit("eps", eps, {.doc = "added to the root of the second moment", .min = 1e-30, .max = 1.0});
    visit("weight_decay", weight_decay, {.doc = "decoupled weight decay, times the rate", .min = 0.0, .max = 10.0});
  }
};

struct MuonConfig {
  double momentum = 0.95;
  bool nesterov = true;
  int64_t newton_schulz_steps = 5;
  double weight_decay = 0.1;
  double update_rms = 0.2;  // update scaled by update_rms * sqrt(max(rows, cols)) of the block
  bool bf16 = true;         // Newton-Schulz products in bf16
  double eps = 1e-7;        // smallest norm that a block is divided by
  // "rms": as update_rms says; "original": update scaled by sqrt(max(1, rows / cols)) of the block.
  std::string scale = "rms";
  // false: M <- mu M + G; true: M <- mu M + (1 - mu) G. The update is the same but where eps matters.
  bool average_momentum = false;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("momentum", momentum, {.doc = "decay of the momentum", .min = 0.0, .max = 0.9999999});
    visit("nesterov", nesterov, {.doc = "look one step ahead"});
    visit("newton_schulz_steps", newton_schulz_steps, {.doc = "iterations", .min = 1, .max = 20});
    visit("weight_decay", weight_decay, {.doc = "decoupled weight decay, times the rate", .min = 0.0, .max = 10.0});
    visit("update_rms", update_rms, {.doc = "RMS of the update relative to the rate", .min = 1e-6, .max = 100.0});
    visit("bf16", bf16, {.doc = "Newton-Schulz products in bf16"});
    visit("eps", eps, {.doc = "smallest norm that a block is divided by", .min = 1e-30, .max = 1.0});
    visit("scale", scale, {.doc = "size of the update", .one_of = {"rms", "original"}});
    visit("average_momentum", average_momentum, {.doc = "momentum as a running average of the gradients"});
  }
};

struct OptimizerConfig {
  AdamWConfig adamw;
  MuonConfig muon;
  bool use_muon = true;         // false: AdamW for everything
  double adamw_lr_scale = 1.0;  // AdamW's rate relative to the schedule's

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("use_muon", use_muon, {.doc = "Muon for the matrices; false: AdamW for everything"});
    visit("adamw_lr_scale", adamw_lr_scale, {.doc = "AdamW's rate relative to the schedule's", .min = 0.0});
    visit("muon", muon, {.doc = "Muon"});
    visit("adamw", adamw, {.doc = "AdamW"});
  }
};

class Optimizer {
 public:
  /// `params` stay owned by the model; moments are made at once, in fp32, on each parameter's device.
  Optimizer(const std::vector<Param>& params, const OptimizerConfig& config);

  /// One step from the parameters' .grad() (undefined gradient: the parameter is left alone). AdamW's bias correction
  /// counts the steps of the optimizer, not those in which the parameter had a gradient.
  void step(double lr);
  void zero_grad();
  int64_t num_steps() const { return num_steps_; }

  /// Moments under "<parameter>.momentum", ".exp_avg", ".exp_avg_sq", for checkpoints.
  std::vector<std::pair<std::string, at::Tensor>> state() const;
  /// Copies the moments back. FormatError when one is missing or has another shape.
  void load_state(const std::vector<std::pair<std::string, at::Tensor>>& state, int64_t num_steps);

 private:
  struct Slot {
    Param param;
    at::Tensor momentum;             // Muon
    at::Tensor exp_avg, exp_avg_sq;  // AdamW
  };
  std::vector<Slot> slots_;
  OptimizerConfig config_;
  int64_t num_steps_ = 0;
};

/// Newton-Schulz orthogonalisation of a batch of matrices [b, rows, cols], any shape, each divided by its Frobenius
/// norm (at least eps) first. The result has the input's dtype.
at::Tensor newton_schulz(const at::Tensor& matrices, int64_t steps, bool bf16, double eps = 1e-7);

/// Global L2 norm of the gradients (fp64 accumulation); scales them to max_norm if they exceed it and max_norm > 0.
/// Returns the norm before clipping; non-finite norms leave the gradients alone.
double clip_grad_norm(const std::vector<Param>& params, double max_norm);

}  // namespace furlong
