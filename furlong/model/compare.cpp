#include "furlong/model/compare.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cosine_similarity.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/zeros.h>

#include "furlong/base/shape.h"

namespace furlong {

namespace {

struct Run {
  at::Tensor logits_NV;
  ForwardRecord record;
};

Run run(const Decoder& decoder, const at::Tensor& tokens_N, Numerics numerics) {
  Run result;
  result.record.keep_stream = true;
  const at::Tensor tokens = tokens_N.to(decoder.device());
  const auto layout = SequenceLayout::from_lengths({tokens.size(0)}, decoder.device());
  const at::Tensor hidden_ND =
      decoder.forward(tokens, layout, nullptr, {.numerics = numerics, .record = &result.record});
  result.logits_NV = decoder.logits(hidden_ND, numerics).to(at::kCPU);
  return result;
}

at::Tensor wide(const at::Tensor& x) {
  return x.to(at::kCPU, at::kFloat);
}

double relative_difference(const at::Tensor& a, const at::Tensor& b) {
  const double scale = b.abs().max().item<double>(), difference = (a - b).abs().max().item<double>();
  return scale > 0 ? difference / scale : difference;
}

/// True for tokens whose sets of experts differ.
at::Tensor flips(const LayerRecord& a, const LayerRecord& b) {
  const at::Tensor first = std::get<0>(a.expert_ids_NA.to(at::kCPU).sort(1));
  const at::Tensor second = std::get<0>(b.expert_ids_NA.to(at::kCPU).sort(1));
  return first.ne(second).any(1);
}

void compare_routing(const LayerRecord& a, const LayerRecord& b, int64_t layer, LayerComparison* result,
                     at::Tensor* any_flip_N, std::optional<RoutingFlip>* first) {
  if (!a.expert_ids_NA.defined() || !b.expert_ids_NA.defined()) return;
  const at::Tensor flipped_N = flips(a, b);
  any_flip_N->logical_or_(flipped_N);
  const at::Tensor places = flipped_N.nonzero().flatten();
  result->flipped_tokens = places.numel();
  if (places.numel() == 0) return;
  const at::Tensor margin_N = wide(a.margin_N);
  result->largest_margin = margin_N.index_select(0, places).max().item<double>();
  if (first->has_value()) return;
  const auto token = places[0].item<int64_t>();
  *first = RoutingFlip{layer, token, margin_N[token].item<double>()};
}

void check_alike(const ModelConfig& a, const ModelConfig& b) {
  check_argument(a.hidden_size == b.hidden_size && a.num_layers == b.num_layers && a.vocab_size == b.vocab_size,
                 "compare", "the models differ in width, depth or vocabulary");
  check_argument(a.moe.experts_per_token == b.moe.experts_per_token, "compare",
                 "the models choose different numbers of experts");
}

}  // namespace

Comparison compare_decoders(const Decoder& a, const Decoder& b, const at::Tensor& tokens_N, Numerics numerics) {
  const at::NoGradGuard no_grad;
  check_alike(a.config(), b.config());
  const Run first = run(a, tokens_N, numerics), second = run(b, tokens_N, numerics);
  Comparison result;
  result.tokens = tokens_N.size(0);
  at::Tensor any_flip_N = at::zeros({result.tokens}, at::kBool);
  for (size_t i = 0; i < first.record.layers.size(); ++i) {
    LayerComparison layer;
    const at::Tensor x = wide(first.record.stream_ND[i]), y = wide(second.record.stream_ND[i]);
    layer.difference = relative_difference(x, y);
    layer.median_cosine = at::cosine_similarity(x, y, 1).median().item<double>();
    compare_routing(first.record.layers[i], second.record.layers[i], static_cast<int64_t>(i), &layer, &any_flip_N,
                    &result.first_flip);
    result.layers.push_back(layer);
  }
  const at::Tensor& x = first.logits_NV;
  const at::Tensor& y = second.logits_NV;
  const at::Tensor cosine_N = at::cosine_similarity(x, y, 1);
  result.tokens_with_flips = any_flip_N.sum().item<int64_t>();
  result.logit_difference = relative_difference(x, y);
  result.median_cosine = cosine_N.median().item<double>();
  result.smallest_cosine = cosine_N.min().item<double>();
  const at::Tensor p = at::log_softmax(x, 1), q = at::log_softmax(y, 1);
  result.mean_divergence = (p.exp() * (p - q)).sum(1).mean().item<double>();
  result.other_argmax = x.argmax(1).ne(y.argmax(1)).sum().item<int64_t>();
  return result;
}

}  // namespace furlong
