#include "furlong/ops/moe/experts/rows.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cstring>
#include <vector>

#include "furlong/base/parallel.h"
#include "furlong/ops/common/kernel.h"

namespace furlong::moe_experts_detail {

namespace {

constexpr int64_t kRowGrain = 64;

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace

at::Tensor gather_rows(const at::Tensor& x_NL, const Pairs& pairs) {
  const int64_t row_bytes = x_NL.size(1) * static_cast<int64_t>(x_NL.element_size());
  at::Tensor out_PL = at::empty({pairs.num_places(), x_NL.size(1)}, x_NL.options());
  const auto* from = static_cast<const char*>(x_NL.const_data_ptr());
  auto* to = static_cast<char*>(out_PL.data_ptr());
  parallel_for(0, pairs.num_places(), kRowGrain, [&](int64_t first, int64_t last) {
    for (int64_t place = first; place < last; ++place) {
      const int64_t pair = pairs.pair_of_place[place];
      if (pair == kNoPair) {
        std::memset(to + place * row_bytes, 0, row_bytes);
      } else {
        std::memcpy(to + place * row_bytes, from + pair / pairs.num_chosen * row_bytes, row_bytes);
      }
    }
  });
  return out_PL;
}

at::Tensor combine_rows(const at::Tensor& y_PL, const at::Tensor& weights_NA, const Pairs& pairs, int64_t num_tokens) {
  const int64_t width = y_PL.size(1), chosen = pairs.num_chosen;
  at::Tensor out_NL = at::empty({num_tokens, width}, y_PL.options());
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, y_PL.scalar_type(), "moe_experts", [&] {
    using wide_t = Wide<scalar_t>;
    const scalar_t* y = y_PL.const_data_ptr<scalar_t>();
    const wide_t* weights = weights_NA.defined() ? weights_NA.const_data_ptr<wide_t>() : nullptr;
    scalar_t* out = out_NL.data_ptr<scalar_t>();
    parallel_for(0, num_tokens, kRowGrain, [&](int64_t first, int64_t last) {
      std::vector<wide_t> sum(width);
      for (int64_t n = first; n < last; ++n) {
        std::fill(sum.begin(), sum.end(), wide_t(0));
        for (int64_t a = 0; a < chosen; ++a) {
          const scalar_t* row = y + pairs.place_of_pair[n * chosen + a] * width;
          const wide_t weight = weights != nullptr ? weights[n * chosen + a] : wide_t(1);
          for (int64_t l = 0; l < width; ++l) sum[l] += weight * static_cast<wide_t>(row[l]);
        }
        for (int64_t l = 0; l < width; ++l) out[n * width + l] = static_cast<scalar_t>(sum[l]);
      }
    });
  });
  return out_NL;
}

WeightedHidden weigh_hidden(const at::Tensor& hidden_PI, at::Tensor& grad_PI, const at::Tensor& weights_NA,
                            const Pairs& pairs) {
  const int64_t width = hidden_PI.size(1);
  WeightedHidden out{at::empty_like(weights_NA), at::empty_like(hidden_PI)};
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, hidden_PI.scalar_type(), "_moe_experts_backward", [&] {
    using wide_t = Wide<scalar_t>;
    const scalar_t* hidden = hidden_PI.const_data_ptr<scalar_t>();
    const wide_t* weights = weights_NA.const_data_ptr<wide_t>();
    scalar_t* grad = grad_PI.data_ptr<scalar_t>();
    scalar_t* weighted = out.weighted_hidden_PI.data_ptr<scalar_t>();
    wide_t* grad_weights = out.grad_weights_NA.data_ptr<wide_t>();
    parallel_for(0, pairs.num_places(), kRowGrain, [&](int64_t first, int64_t last) {
      for (int64_t place = first; place < last; ++place) {
        const int64_t pair = pairs.pair_of_place[place];
        const wide_t weight = pair == kNoPair ? wide_t(0) : weights[pair];
        // Four partial sums: a single chain of additions would wait for itself.
        wide_t dot[4] = {};
        for (int64_t i = 0; i < width; ++i) {
          const auto h = static_cast<wide_t>(hidden[place * width + i]);
          const auto g = static_cast<wide_t>(grad[place * width + i]);
          dot[i % 4] += h * g;
          weighted[place * width + i] = static_cast<scalar_t>(weight * h);
          grad[place * width + i] = static_cast<scalar_t>(weight * g);
        }
        if (pair != kNoPair) grad_weights[pair] = (dot[0] + dot[1]) + (dot[2] + dot[3]);
      }
    });
  });
  return out;
}

}  // namespace furlong::moe_experts_detail
