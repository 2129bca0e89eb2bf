#pragma once

// Names and stored shapes of the published checkpoints (Kimi-Linear flat, Kimi-K3 below "language_model."), both ways.
//
// A layer's parameters are named as published below the layer's prefix (ParamSpec), so the layer type decides what a
// name means: "self_attn.g_proj.weight" is the output gate of KDA in a KDA layer and that of MLA in an MLA layer.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "furlong/model/config.h"
#include "furlong/ops/common/param_spec.h"

namespace furlong {

/// Kimi-K3 puts this in front of the text model's names; Kimi-Linear does not.
constexpr std::string_view kTextPrefix = "language_model.";

/// A parameter, or one index of a stacked one, as a checkpoint written today has it.
struct PublishedTensor {
  std::string name;
  std::vector<int64_t> shape;
  int64_t index;  // into the stacked dimension; -1: the whole parameter
};
std::vector<PublishedTensor> published_tensors(const ModelConfig& config, const Param& param);
/// The same names without any prefix.
std::vector<std::string> published_names(const ParamSpec& spec);

/// Today's spelling of a published name. Older exports write "self_attention_res.proj_weight", "mlp_res.norm_weight",
/// "output_attn_res.proj_weight" and "block_sparse_moe.e_score_correction_bias".
std::string canonical_name(const std::string& published);

/// True for tensors of parts that are not run yet (the vision tower and its projector): carried through untouched.
bool is_carried(std::string_view canonical);

/// True when a checkpoint may store the parameter in this shape: the published one, a convolution without its middle
/// dimension, A_log as [H], [1, 1, H, 1], or padded with zeros to one longer dimension (Kimi-K3 stores 128 for 96).
bool accepts_shape(const ParamSpec& spec, const std::vector<int64_t>& shape);
bool is_a_log(const ParamSpec& spec);

/// The part of the model that a tensor belongs to, for reports: "KDA", "MLA", "routed experts", "vision", ...
std::string tensor_group(const ModelConfig& config, std::string_view canonical);

}  // namespace furlong
