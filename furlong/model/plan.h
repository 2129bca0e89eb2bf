#pragma once

// How many bytes a run will take, before it starts. Weights, gradients, moments, states and caches are exact (they
// follow from the parameter list); activations are an estimate of what autograd keeps, see plan.cpp and README.md for
// its error against measured runs.

#include <cstdint>

#include "furlong/model/config.h"

namespace furlong {

struct PlanRequest {
  int64_t context = 1024;  // tokens of a sequence
  int64_t batch = 1;       // sequences in one forward (a micro-batch)
  bool bf16 = false;       // compute dtype; masters, gradients and moments stay fp32
  bool recompute = false;
  bool muon = true;  // one moment for matrices; false: AdamW for everything
};

struct TrainingBytes {
  double weights = 0;
  double gradients = 0;
  double optimizer = 0;
  double activations = 0;
  double total() const { return weights + gradients + optimizer + activations; }
};

struct ServingBytes {
  double weights = 0;
  double state = 0;  // recurrent, of all sequences
  double conv_state = 0;
  double cache = 0;  // latent caches at full context
  double total() const { return weights + state + conv_state + cache; }
};

TrainingBytes plan_training(const ModelConfig& config, const PlanRequest& request);
ServingBytes plan_serving(const ModelConfig& config, const PlanRequest& request);

}  // namespace furlong
