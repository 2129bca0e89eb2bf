#include "furlong/ops/attnres/layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/ones.h>

namespace furlong {

void AttnResRead::declare(ParamList& list, const std::string& stem) {
  list.add(stem,
           {.name = "_norm.weight",
            .shape = {hidden_size_},
            .dtype = DtypePolicy::kFp32,
            .weight_decay = false,
            .init = Init::constant(1.0)},
           &norm_);
  list.add(stem,
           {.name = "_proj.weight",
            .shape = {1, hidden_size_},
            .dtype = DtypePolicy::kFp32,
            .weight_decay = false,
            .init = Init::constant(0.0)},
           &proj_);
}

at::Tensor AttnResRead::forward(const std::vector<at::Tensor>& sources_ND, at::Tensor* mean_weight_S) const {
  const at::Tensor w_D = norm_ * proj_.squeeze(0);
  auto [out_ND, p_NS] = attnres_read(sources_ND, w_D, eps_);
  if (mean_weight_S != nullptr) *mean_weight_S = p_NS.mean(0);
  return out_ND;
}

at::Tensor ResidualStream::read(const AttnResRead& read, at::Tensor* mean_weight_S) const {
  if (blocks_.empty()) {
    if (mean_weight_S != nullptr) *mean_weight_S = at::ones({1}, prefix_.options().dtype(at::kFloat));
    return prefix_;
  }
  std::vector<at::Tensor> sources_ND = blocks_;
  if (prefix_.defined()) sources_ND.push_back(prefix_);
  return read.forward(sources_ND, mean_weight_S);
}

void ResidualStream::seal_before(int64_t layer) {
  if (layer % block_size_ != 0) return;
  blocks_.push_back(prefix_);
  prefix_ = at::Tensor();
}

void ResidualStream::add(const at::Tensor& output_ND) {
  prefix_ = prefix_.defined() ? prefix_ + output_ND : output_ND;
}

}  // namespace furlong
