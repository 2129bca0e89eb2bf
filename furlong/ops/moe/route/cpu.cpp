// moe_route on the CPU: one pass over a token's scores, parallel over tokens.
//   N tokens   E experts   A chosen
//
// The best A + 1 biased scores are kept in a short sorted list; a score enters only if it is greater than the list's
// last, so of equal scores the lowest index wins.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <vector>

#include "furlong/base/parallel.h"
#include "furlong/base/shape.h"
#include "furlong/ops/moe/route/route_op.h"

namespace furlong::moe_route_detail {

namespace {

constexpr int64_t kTokenGrain = 64;

/// The best `capacity` (value, index) pairs seen, best first.
template <typename T>
class BestList {
 public:
  explicit BestList(int64_t capacity) : values_(capacity), indices_(capacity) {}
  void clear() { size_ = 0; }
  int64_t size() const { return size_; }
  T value(int64_t rank) const { return values_[rank]; }
  int64_t index(int64_t rank) const { return indices_[rank]; }

  void offer(T value, int64_t index) {
    const auto capacity = static_cast<int64_t>(values_.size());
    if (size_ == capacity && !(value > values_[size_ - 1])) return;
    int64_t place = size_ < capacity ? size_++ : size_ - 1;
    for (; place > 0 && value > values_[place - 1]; --place) {
      values_[place] = values_[place - 1];
      indices_[place] = indices_[place - 1];
    }
    values_[place] = value;
    indices_[place] = index;
  }

 private:
  std::vector<T> values_;
  std::vector<int64_t> indices_;
  int64_t size_ = 0;
};

/// Marks the groups whose two best biased scores have the largest sums.
template <typename T>
void keep_groups(const std::vector<T>& choice_E, const RouteConfig& config, std::vector<char>& kept_G) {
  const auto group_size = static_cast<int64_t>(choice_E.size()) / config.num_groups;
  BestList<T> best(config.groups_kept), best_two(std::min<int64_t>(2, group_size));
  for (int64_t group = 0; group < config.num_groups; ++group) {
    best_two.clear();
    for (int64_t e = 0; e < group_size; ++e) best_two.offer(choice_E[group * group_size + e], e);
    best.offer(best_two.value(0) + (best_two.size() > 1 ? best_two.value(1) : T(0)), group);
    kept_G[group] = 0;
  }
  for (int64_t rank = 0; rank < config.groups_kept; ++rank) kept_G[best.index(rank)] = 1;
}

/// Weights of one token's experts: gathered, renormalised, scaled.
template <typename T>
void fill_weights(const T* scores_E, const int64_t* ids_A, const RouteConfig& config, T* weights_A) {
  T sum = 0;
  for (int64_t a = 0; a < config.num_chosen; ++a) sum += weights_A[a] = scores_E[ids_A[a]];
  const bool divide = config.renormalize && config.num_chosen > 1;
  const T divisor = divide ? sum + T(kWeightSumEpsilon) : T(1);
  for (int64_t a = 0; a < config.num_chosen; ++a) weights_A[a] = weights_A[a] / divisor * T(config.scale);
}

template <typename T>
struct Buffers {
  const T* logits;
  const T* bias;
  const int64_t* forced;
  int64_t* ids;
  T* weights;
  T* scores;
  T* cutoff;
  T* margin;
};

template <typename T>
void route_tokens(const Buffers<T>& at, int64_t first, int64_t last, int64_t num_experts, const RouteConfig& config) {
  const int64_t chosen = config.num_chosen, group_size = num_experts / config.num_groups;
  const int64_t listed = std::min(chosen + 1, group_size * config.groups_kept);
  std::vector<T> choice(num_experts);
  std::vector<char> kept(config.num_groups, 1);
  BestList<T> best(listed);
  for (int64_t n = first; n < last; ++n) {
    T* scores = at.scores + n * num_experts;
    for (int64_t e = 0; e < num_experts; ++e) {
      const T logit = at.logits[n * num_experts + e];
      if (!std::isfinite(logit)) {
        throw NumericError("[moe_route] logits_NE: the score of expert " + std::to_string(e) + " for token " +
                           std::to_string(n) + " is not finite");
      }
      scores[e] = T(1) / (T(1) + std::exp(-logit));
      choice[e] = scores[e] + at.bias[e];
    }
    if (config.groups_kept < config.num_groups) keep_groups(choice, config, kept);
    best.clear();
    for (int64_t group = 0; group < config.num_groups; ++group) {
      if (!kept[group]) continue;
      for (int64_t e = group * group_size; e < (group + 1) * group_size; ++e) best.offer(choice[e], e);
    }
    int64_t* ids = at.ids + n * chosen;
    for (int64_t a = 0; a < chosen; ++a) ids[a] = at.forced ? at.forced[n * chosen + a] : best.index(a);
    at.cutoff[n] = best.value(listed - 1);
    at.margin[n] = best.value(chosen - 1) - best.value(listed - 1);
    fill_weights(scores, ids, config, at.weights + n * chosen);
  }
}

void check_forced_range(const at::Tensor& ids_NA, int64_t num_experts) {
  const int64_t* ids = ids_NA.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids_NA.numel(); ++i) {
    check_argument(
        ids[i] >= 0 && ids[i] < num_experts, "moe_route",
        "forced_ids_NA: got expert " + std::to_string(ids[i]) + ", need 0 to " + std::to_string(num_experts - 1));
  }
}

Outputs route_cpu(const at::Tensor& logits_in, const at::Tensor& bias_in, int64_t num_chosen, int64_t num_groups,
                  int64_t groups_kept, bool renormalize, double scale, const std::optional<at::Tensor>& forced_ids_NA) {
  const RouteConfig config{num_chosen, num_groups, groups_kept, renormalize, scale};
  check(logits_in, bias_in, config, forced_ids_NA);
  const at::Tensor logits_NE = logits_in.contiguous(), bias_E = bias_in.contiguous();
  const at::Tensor forced = forced_ids_NA ? forced_ids_NA->contiguous() : at::Tensor();
  if (forced.defined()) check_forced_range(forced, logits_NE.size(1));
  const int64_t tokens = logits_NE.size(0);
  at::Tensor ids = at::empty({tokens, num_chosen}, logits_NE.options().dtype(at::kLong));
  at::Tensor weights = at::empty({tokens, num_chosen}, logits_NE.options()), scores = at::empty_like(logits_NE);
  at::Tensor cutoff = at::empty({tokens}, logits_NE.options()), margin = at::empty({tokens}, logits_NE.options());
  AT_DISPATCH_FLOATING_TYPES(logits_NE.scalar_type(), "moe_route", [&] {
    const Buffers<scalar_t> at{logits_NE.const_data_ptr<scalar_t>(),
                               bias_E.const_data_ptr<scalar_t>(),
                               forced.defined() ? forced.const_data_ptr<int64_t>() : nullptr,
                               ids.data_ptr<int64_t>(),
                               weights.data_ptr<scalar_t>(),
                               scores.data_ptr<scalar_t>(),
                               cutoff.data_ptr<scalar_t>(),
                               margin.data_ptr<scalar_t>()};
    parallel_for(0, tokens, kTokenGrain, [&](int64_t first, int64_t last) {
      route_tokens<scalar_t>(at, first, last, logits_NE.size(1), config);
    });
  });
  return {ids, weights, scores, cutoff, margin};
}

template <typename T>
void backward_token(const T* grad_A, const int64_t* ids_A, const T* scores_E, int64_t chosen, bool divide, T scale,
                    T* grad_logits_E) {
  T sum = 0, dot = 0;
  for (int64_t a = 0; a < chosen; ++a) {
    sum += scores_E[ids_A[a]];
    dot += scores_E[ids_A[a]] * grad_A[a];
  }
  sum += T(kWeightSumEpsilon);
  for (int64_t a = 0; a < chosen; ++a) {
    const T score = scores_E[ids_A[a]];
    const T grad_score = divide ? (grad_A[a] - dot / sum) / sum : grad_A[a];
    grad_logits_E[ids_A[a]] += scale * grad_score * score * (1 - score);
  }
}

at::Tensor backward_cpu(const at::Tensor& grad_weights_in, const at::Tensor& ids_in, const at::Tensor& scores_in,
                        bool renormalize, double scale) {
  const at::Tensor grad_weights = grad_weights_in.contiguous(), ids = ids_in.contiguous();
  const at::Tensor scores = scores_in.contiguous();
  const int64_t tokens = scores.size(0), num_experts = scores.size(1), chosen = ids.size(1);
  at::Tensor grad_logits = at::zeros_like(scores);
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "_moe_route_backward", [&] {
    const scalar_t* grad = grad_weights.const_data_ptr<scalar_t>();
    const scalar_t* score = scores.const_data_ptr<scalar_t>();
    const int64_t* id = ids.const_data_ptr<int64_t>();
    scalar_t* out = grad_logits.data_ptr<scalar_t>();
    parallel_for(0, tokens, kTokenGrain, [&](int64_t first, int64_t last) {
      for (int64_t n = first; n < last; ++n) {
        backward_token<scalar_t>(grad + n * chosen, id + n * chosen, score + n * num_experts, chosen,
                                 renormalize && chosen > 1, scalar_t(scale), out + n * num_experts);
      }
    });
  });
  return grad_logits;
}

}  // namespace

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("moe_route", route_cpu);
  m.impl("_moe_route_backward", backward_cpu);
}

}  // namespace furlong::moe_route_detail
