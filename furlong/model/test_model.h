#pragma once

// A small model with every mechanism, for tests.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/max.h>
#include <ATen/ops/tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "furlong/base/rng.h"
#include "furlong/model/decoder.h"
#include "furlong/model/initialize.h"

namespace furlong {

/// configs/model/tiny.toml with assignments, as `--set` makes them.
inline ModelConfig tiny_config(const std::vector<std::string>& assignments = {}) {
  ConfigDocument document = ConfigDocument::from_file(std::string(FURLONG_SOURCE_DIR) + "/configs/model/tiny.toml");
  for (const std::string& assignment : assignments) document.set(assignment);
  return ModelConfig::from_document(document);
}

/// Moves every parameter off its initial value, as training would: noise of a tenth of its size, and where it starts at
/// a constant (norms, pseudo-queries, biases) of 0.05. Larger pseudo-queries make random models ill-conditioned.
inline void perturb(const Decoder& decoder, uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (const Param& param : decoder.params()) {
    ParamSpec noise = param.spec;
    const bool constant = noise.init.kind == Init::Kind::kConstant || noise.init.kind == Init::Kind::kLogUniform;
    noise.init = Init::normal(constant ? 0.05 : 0.1 * noise.init.a);
    param.tensor->add_(draw_initial(noise, seed).to(param.tensor->options()));
  }
}

inline std::unique_ptr<Decoder> tiny_decoder(const std::vector<std::string>& assignments = {},
                                             at::ScalarType dtype = at::kFloat, bool trainable = true) {
  auto decoder = std::make_unique<Decoder>(tiny_config(assignments));
  decoder->initialize(7, dtype, at::kCPU, trainable);
  perturb(*decoder, 11);
  return decoder;
}

inline at::Tensor random_tokens(int64_t count, int64_t vocab_size, uint64_t seed) {
  Rng rng(seed);
  std::vector<int64_t> ids(count);
  for (int64_t& id : ids) id = static_cast<int64_t>(rng.below(vocab_size));
  return at::tensor(ids, at::kLong);
}

/// max|a - b| / max|b|; 0 for empty tensors.
inline double relative_error(const at::Tensor& a, const at::Tensor& b) {
  if (b.numel() == 0) return 0.0;
  const double scale = b.detach().to(at::kDouble).abs().max().item<double>();
  const double error = (a.detach().to(at::kDouble) - b.detach().to(at::kDouble)).abs().max().item<double>();
  return scale > 0 ? error / scale : error;
}

}  // namespace furlong
