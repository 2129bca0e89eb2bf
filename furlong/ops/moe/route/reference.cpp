// moe_route in plain tensor operations: the oracle, and the path of every device without a kernel of its own.
//   N tokens   E experts   A chosen   G groups

#include <ATen/TensorOperators.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "furlong/ops/moe/route/route_op.h"

namespace furlong::moe_route_detail {

namespace {

/// Biased scores with the experts of dropped groups at minus infinity. A group counts as much as its two best.
at::Tensor eligible_choice(const at::Tensor& choice_NE, int64_t num_groups, int64_t groups_kept) {
  if (num_groups == groups_kept) return choice_NE;
  const int64_t group_size = choice_NE.size(1) / num_groups;
  const at::Tensor grouped_NGM = choice_NE.view({-1, num_groups, group_size});
  const at::Tensor best_two = std::get<0>(grouped_NGM.topk(std::min<int64_t>(2, group_size), -1));
  const at::Tensor order_NG = std::get<1>(best_two.sum(-1).sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true));
  const at::Tensor kept_NG = at::zeros_like(order_NG).scatter(1, order_NG.narrow(1, 0, groups_kept), 1).to(at::kBool);
  return at::where(kept_NG.unsqueeze(-1), grouped_NGM, -std::numeric_limits<double>::infinity()).view_as(choice_NE);
}

Outputs reference(const at::Tensor& logits_NE, const at::Tensor& bias_E, int64_t num_chosen, int64_t num_groups,
                  int64_t groups_kept, bool renormalize, double scale, const std::optional<at::Tensor>& forced_ids_NA) {
  check(logits_NE, bias_E, {num_chosen, num_groups, groups_kept, renormalize, scale}, forced_ids_NA);
  at::_assert_async(logits_NE.detach().isfinite().all(), "[moe_route] logits_NE: a score is not finite");
  const at::Tensor scores_NE = at::sigmoid(logits_NE);
  const at::Tensor choice_NE = eligible_choice(scores_NE.detach() + bias_E.detach(), num_groups, groups_kept);
  // A stable sort, not topk, so that ties go to the lowest index on every device.
  const auto [sorted_NE, order_NE] = choice_NE.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true);
  const int64_t eligible = choice_NE.size(1) / num_groups * groups_kept;
  const at::Tensor last = sorted_NE.select(1, num_chosen - 1);
  const at::Tensor cutoff = sorted_NE.select(1, std::min(num_chosen, eligible - 1)).contiguous();
  const at::Tensor ids_NA = forced_ids_NA ? *forced_ids_NA : order_NE.narrow(1, 0, num_chosen).contiguous();
  at::Tensor weights_NA = scores_NE.gather(1, ids_NA);
  if (renormalize && num_chosen > 1) weights_NA = weights_NA / (weights_NA.sum(1, true) + kWeightSumEpsilon);
  return {ids_NA, weights_NA * scale, scores_NE.detach(), cutoff, last - cutoff};
}

at::Tensor backward_reference(const at::Tensor& grad_weights_NA, const at::Tensor& ids_NA, const at::Tensor& scores_NE,
                              bool renormalize, double scale) {
  const at::Tensor chosen_NA = scores_NE.gather(1, ids_NA);
  at::Tensor grad_NA = grad_weights_NA * scale;
  if (renormalize && ids_NA.size(1) > 1) {
    const at::Tensor sum = chosen_NA.sum(1, true) + kWeightSumEpsilon;
    grad_NA = (grad_NA - (grad_NA * chosen_NA).sum(1, true) / sum) / sum;
  }
  // scatter_add: forced ids may name an expert twice.
  return at::zeros_like(scores_NE).scatter_add(1, ids_NA, grad_NA * chosen_NA * (1 - chosen_NA));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def(
      "moe_route_reference(Tensor logits, Tensor bias, int num_chosen, int num_groups, int groups_kept, "
      "bool renormalize, float scale, Tensor? forced_ids) -> (Tensor ids, Tensor weights, Tensor scores, "
      "Tensor cutoff, Tensor margin)");
}

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("moe_route_reference", reference);
}

TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("moe_route", reference);
  m.impl("_moe_route_backward", backward_reference);
}

}  // namespace furlong::moe_route_detail
