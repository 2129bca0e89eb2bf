#include "furlong/ops/mla/layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>

#include "furlong/base/shape.h"
#include "furlong/ops/common/linear.h"
#include "furlong/ops/mla/layer_blocked.h"
#include "furlong/ops/mla/mla.h"
#include "furlong/ops/norm/norm.h"

namespace furlong {

namespace {

MlaWidths widths_of(const MlaLayerConfig& config) {
  return {config.num_heads, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim};
}

double score_scale(const MlaLayerConfig& config) {
  return 1.0 / std::sqrt(static_cast<double>(config.qk_nope_head_dim + config.qk_rope_head_dim));
}

/// Writes the new tokens' entries behind what their slots hold.
void append(LatentCache& cache, const at::Tensor& entries_TE, const SequenceLayout& layout) {
  check_argument(!(at::GradMode::is_enabled() && entries_TE.requires_grad()), "MlaLayer",
                 "state: the latent cache cannot be written under autograd");
  int64_t needed = 0;
  for (int64_t b = 0; b < layout.num_sequences(); ++b) {
    needed = std::max(needed, layout.past(b) + layout.length(b));
    check_argument(layout.slot(b) >= 0 && layout.slot(b) < cache.pool_SCE.size(0), "MlaLayer",
                   "state: slot " + std::to_string(layout.slot(b)) + " of " + std::to_string(cache.pool_SCE.size(0)));
  }
  cache.reserve(needed);
  const at::Tensor row_T = at::arange(entries_TE.size(0), layout.offsets().options());
  const at::Tensor sequence_T = at::searchsorted(layout.offsets(), row_T, /*out_int32=*/false, /*right=*/true) - 1;
  const at::Tensor place_B = layout.slots() * cache.capacity() + layout.past() - layout.offsets().slice(0, 0, -1);
  cache.pool_SCE.view({-1, entries_TE.size(1)})
      .index_copy_(0, place_B.index_select(0, sequence_T) + row_T, entries_TE.to(cache.pool_SCE.scalar_type()));
}

/// New tokens up to which a sequence on a past is cheaper absorbed than expanded. Products a head and context entry:
/// absorbed 2 L + R for every query; expanded nope + R + V for every query, and L (nope + V) once. Both run at the same
/// rate (README.md).
int64_t absorbed_limit(const MlaLayerConfig& config) {
  const int64_t expanded_sizes = config.qk_nope_head_dim + config.v_head_dim;
  const int64_t dearer = 2 * config.kv_lora_rank - expanded_sizes;
  return dearer <= 0 ? INT64_MAX : std::max<int64_t>(config.kv_lora_rank * expanded_sizes / dearer, 1);
}

/// [H, nope + V, L] in the compute dtype.
at::Tensor per_head(const at::Tensor& kv_b, const MlaLayerConfig& config, at::ScalarType dtype) {
  return kv_b.to(dtype).view({config.num_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank});
}

/// Every sequence of `layout` in absorbed form.
at::Tensor attend_absorbed(const at::Tensor& q_THQ, const LatentCache& cache, const SequenceLayout& layout,
                           const at::Tensor& kv_b, const MlaLayerConfig& config) {
  const at::Tensor weight_HXL = per_head(kv_b, config, q_THQ.scalar_type());
  const int64_t nope = config.qk_nope_head_dim, latent = config.kv_lora_rank;
  const at::Tensor q_nope_HTN = q_THQ.narrow(2, 0, nope).transpose(0, 1);
  const at::Tensor q_latent_THL = at::bmm(q_nope_HTN, weight_HXL.narrow(1, 0, nope)).transpose(0, 1);
  const at::Tensor q_THE = at::cat({q_latent_THL, q_THQ.narrow(2, nope, config.qk_rope_head_dim)}, 2);
  const at::Tensor u_THL = mla_absorbed(q_THE, cache.pool_SCE, layout, latent, score_scale(config));
  const at::Tensor value_HLV = weight_HXL.narrow(1, nope, config.v_head_dim).transpose(1, 2);
  return at::bmm(u_THL.transpose(0, 1), value_HLV).transpose(0, 1);
}

/// Fresh sequences in expanded form. entries_TE holds their normalised latents and shared keys.
at::Tensor attend_expanded(const at::Tensor& q_THQ, const at::Tensor& entries_TE, const SequenceLayout& layout,
                           const at::Tensor& kv_b, const MlaLayerConfig& config) {
  const int64_t tokens = q_THQ.size(0), nope = config.qk_nope_head_dim;
  const at::Tensor kv_THX = linear(entries_TE.narrow(1, 0, config.kv_lora_rank), kv_b, Numerics::kFast)
                                .view({tokens, config.num_heads, nope + config.v_head_dim});
  const at::Tensor shared_THR = entries_TE.narrow(1, config.kv_lora_rank, config.qk_rope_head_dim)
                                    .unsqueeze(1)
                                    .expand({tokens, config.num_heads, config.qk_rope_head_dim});
  at::Tensor q = q_THQ, k = at::cat({kv_THX.narrow(2, 0, nope), shared_THR}, 2);
  at::Tensor v = kv_THX.narrow(2, nope, config.v_head_dim);
  if (config.output_fp32 && q.scalar_type() != at::kDouble) {
    q = q.to(at::kFloat);
    k = k.to(at::kFloat);
    v = v.to(at::kFloat);
  }
  return mla_attention(q, k, v, layout, score_scale(config));
}

/// One sequence of a call with state, by the cheapest form that keeps the numerics.
at::Tensor attend_one(int64_t b, const at::Tensor& q_THQ, const at::Tensor& entries_TE, const LatentCache& cache,
                      const SequenceLayout& layout, const at::Tensor& kv_b, const MlaLayerConfig& config,
                      Numerics numerics) {
  const int64_t start = layout.start(b), length = layout.length(b), past = layout.past(b);
  const at::Tensor q = q_THQ.narrow(0, start, length);
  if (numerics == Numerics::kFast && length <= absorbed_limit(config)) {
    const auto one = SequenceLayout::with_state({length}, {layout.slot(b)}, {past}, q.device());
    return attend_absorbed(q, cache, one, kv_b, config);
  }
  if (numerics == Numerics::kFast && past == 0) {
    const auto one = SequenceLayout::from_lengths({length}, q.device());
    return attend_expanded(q, entries_TE.narrow(0, start, length), one, kv_b, config);
  }
  const at::Tensor context_CE = cache.pool_SCE.select(0, layout.slot(b)).narrow(0, 0, past + length);
  return mla_blocked_attention(q, context_CE, kv_b, past, widths_of(config), score_scale(config), numerics);
}

/// The library's elementwise functions take the last few elements of a tensor by scalar code, with other bits than the
/// vector code's. In exact mode every row is a call of its own, so that an element's place in the call is fixed.
at::Tensor sigmoid_rows(const at::Tensor& x_TX, Numerics numerics) {
  if (numerics == Numerics::kFast) return x_TX.sigmoid();
  std::vector<at::Tensor> rows;
  for (const at::Tensor& row : x_TX.unbind(0)) rows.push_back(row.sigmoid());
  return at::stack(rows);
}

at::Tensor attend_with_state(const at::Tensor& q_THQ, const at::Tensor& entries_TE, LatentCache& cache,
                             const SequenceLayout& layout, const at::Tensor& kv_b, const MlaLayerConfig& config,
                             Numerics numerics) {
  append(cache, entries_TE, layout);
  if (numerics == Numerics::kFast && layout.max_length() <= absorbed_limit(config)) {
    return attend_absorbed(q_THQ, cache, layout, kv_b, config);
  }
  std::vector<at::Tensor> parts;
  for (int64_t b = 0; b < layout.num_sequences(); ++b) {
    if (layout.length(b) == 0) continue;
    parts.push_back(attend_one(b, q_THQ, entries_TE, cache, layout, kv_b, config, numerics).to(at::kFloat));
  }
  return at::cat(parts);
}

at::Tensor attend_fresh(const at::Tensor& q_THQ, const at::Tensor& entries_TE, const SequenceLayout& layout,
                        const at::Tensor& kv_b, const MlaLayerConfig& config, Numerics numerics) {
  if (numerics == Numerics::kFast) return attend_expanded(q_THQ, entries_TE, layout, kv_b, config);
  std::vector<at::Tensor> parts;
  for (int64_t b = 0; b < layout.num_sequences(); ++b) {
    if (layout.length(b) == 0) continue;
    parts.push_back(mla_blocked_attention(q_THQ.narrow(0, layout.start(b), layout.length(b)),
                                          entries_TE.narrow(0, layout.start(b), layout.length(b)), kv_b, /*past=*/0,
                                          widths_of(config), score_scale(config), numerics));
  }
  return at::cat(parts);
}

}  // namespace

void MlaLayer::declare(ParamList& list, const std::string& prefix) {
  const int64_t hidden = config_.hidden_size, heads = config_.num_heads, latent = config_.kv_lora_rank;
  const int64_t key = config_.qk_nope_head_dim + config_.qk_rope_head_dim, value = config_.v_head_dim;
  const auto matrix = [&](const char* name, int64_t rows, int64_t columns, int64_t blocks, at::Tensor* tensor) {
    list.add(prefix,
             {.name = name,
              .shape = {rows, columns},
              .rule = OptimizerRule::kMuon,
              .muon_blocks = blocks,
              .init = Init::normal(config_.init_std)},
             tensor);
  };
  const auto norm = [&](const char* name, int64_t size, at::Tensor* tensor) {
    list.add(prefix, {.name = name, .shape = {size}, .weight_decay = false, .init = Init::constant(1)}, tensor);
  };
  if (config_.q_lora_rank > 0) {
    matrix("q_a_proj.weight", config_.q_lora_rank, hidden, 1, &q_a_proj_);
    norm("q_a_layernorm.weight", config_.q_lora_rank, &q_a_norm_);
    matrix("q_b_proj.weight", heads * key, config_.q_lora_rank, heads, &q_b_proj_);
  } else {
    matrix("q_proj.weight", heads * key, hidden, heads, &q_proj_);
  }
  matrix("kv_a_proj_with_mqa.weight", latent + config_.qk_rope_head_dim, hidden, 1, &kv_a_proj_);
  norm("kv_a_layernorm.weight", latent, &kv_a_norm_);
  matrix("kv_b_proj.weight", heads * (config_.qk_nope_head_dim + value), latent, heads, &kv_b_proj_);
  if (config_.output_gate) matrix("g_proj.weight", heads * value, hidden, heads, &g_proj_);
  matrix("o_proj.weight", hidden, heads * value, 1, &o_proj_);
}

LatentCache MlaLayer::allocate_state(int64_t slots, at::ScalarType compute_dtype, at::Device device) const {
  return LatentCache::allocate(slots, config_.kv_lora_rank + config_.qk_rope_head_dim, compute_dtype, device);
}

at::Tensor MlaLayer::forward(const at::Tensor& x_ND, const SequenceLayout& layout, LatentCache* state,
                             const ForwardContext& context) const {
  check_shape("MlaLayer", "x_ND", x_ND, {-1, config_.hidden_size});
  const int64_t tokens = layout.num_tokens(), spare_rows = x_ND.size(0) - tokens;
  check_argument(spare_rows >= 0, "MlaLayer", "x_ND: fewer rows than the layout has tokens");
  check_argument(state == nullptr || layout.has_state(), "MlaLayer", "layout: has no slots for the state");
  if (tokens == 0) return at::zeros_like(x_ND);
  const Numerics numerics = context.numerics;
  const at::Tensor x_TD = x_ND.narrow(0, 0, tokens);

  const int64_t key = config_.qk_nope_head_dim + config_.qk_rope_head_dim;
  at::Tensor q_THQ =
      config_.q_lora_rank > 0
          ? linear(rms_norm(linear(x_TD, q_a_proj_, numerics), q_a_norm_, config_.latent_norm_eps), q_b_proj_, numerics)
          : linear(x_TD, q_proj_, numerics);
  q_THQ = q_THQ.view({tokens, config_.num_heads, key});
  const at::Tensor kv_TE = linear(x_TD, kv_a_proj_, numerics);
  const at::Tensor latent_TL = rms_norm(kv_TE.narrow(1, 0, config_.kv_lora_rank), kv_a_norm_, config_.latent_norm_eps);
  const at::Tensor shared_TR = kv_TE.narrow(1, config_.kv_lora_rank, config_.qk_rope_head_dim);
  const at::Tensor entries_TE = at::cat({latent_TL, shared_TR}, 1);

  at::Tensor out_THV = state != nullptr
                           ? attend_with_state(q_THQ, entries_TE, *state, layout, kv_b_proj_, config_, numerics)
                           : attend_fresh(q_THQ, entries_TE, layout, kv_b_proj_, config_, numerics);
  at::Tensor out_TX = out_THV.reshape({tokens, config_.num_heads * config_.v_head_dim});
  if (!config_.output_fp32) out_TX = out_TX.to(x_ND.scalar_type());
  if (config_.output_gate) {
    out_TX = out_TX * sigmoid_rows(linear(x_TD, g_proj_, numerics).to(out_TX.scalar_type()), numerics);
  }
  const at::Tensor y_TD = linear(out_TX.to(x_ND.scalar_type()), o_proj_, numerics);
  return spare_rows > 0 ? at::constant_pad_nd(y_TD, {0, 0, 0, spare_rows}) : y_TD;
}

}  // namespace furlong
