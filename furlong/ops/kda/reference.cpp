// The KDA recurrence in plain tensor operations.
//   N packed tokens   B sequences   H heads   K key size   V value size
//
// All sequences advance together: step t works on the sequences that have a token t. Sequences are taken in order of
// falling length, so that those still running are always the first rows of the state.

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/split_with_sizes.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <numeric>

#include "furlong/ops/kda/internal.h"

namespace furlong::kda {

namespace {

/// The tokens in the order in which the recurrence visits them.
struct TimeMajor {
  std::vector<int64_t> order;      // sequences by falling length
  std::vector<int64_t> inverse;    // inverse[order[i]] = i
  std::vector<int64_t> rows;       // packed rows: step 0 of all sequences, step 1 of all, ...
  std::vector<int64_t> positions;  // positions[rows[i]] = i
  std::vector<int64_t> active;     // sequences that take part in each step
};

TimeMajor time_major(const at::Tensor& offsets_host) {
  const auto* offsets = offsets_host.const_data_ptr<int64_t>();
  const int64_t sequences = offsets_host.numel() - 1;
  const auto length = [&](int64_t b) { return offsets[b + 1] - offsets[b]; };
  TimeMajor result;
  result.order.resize(sequences);
  std::iota(result.order.begin(), result.order.end(), 0);
  std::stable_sort(result.order.begin(), result.order.end(),
                   [&](int64_t a, int64_t b) { return length(a) > length(b); });
  result.inverse.resize(sequences);
  for (int64_t i = 0; i < sequences; ++i) result.inverse[result.order[i]] = i;
  result.positions.resize(offsets[sequences]);
  for (int64_t t = 0; static_cast<int64_t>(result.rows.size()) < offsets[sequences]; ++t) {
    int64_t active = 0;
    for (; active < sequences && length(result.order[active]) > t; ++active) {
      const int64_t row = offsets[result.order[active]] + t;
      result.positions[row] = static_cast<int64_t>(result.rows.size());
      result.rows.push_back(row);
    }
    result.active.push_back(active);
  }
  return result;
}

at::Tensor index_tensor(const std::vector<int64_t>& values, const at::Device& device) {
  const auto size = static_cast<int64_t>(values.size());
  return at::from_blob(const_cast<int64_t*>(values.data()), {size}, at::kLong).to(device, at::kLong, false, true);
}

struct Step {
  at::Tensor state, out;
};

Step step(const at::Tensor& state_BHKV, const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
          const at::Tensor& decay_log_BHK, const at::Tensor& beta_BH, double scale) {
  const at::Tensor decayed = state_BHKV * decay_log_BHK.exp().unsqueeze(-1);
  const at::Tensor recall_BHV = (decayed * k_BHK.unsqueeze(-1)).sum(-2);
  const at::Tensor write_BHV = beta_BH.unsqueeze(-1) * (v_BHV - recall_BHV);
  const at::Tensor state = decayed + k_BHK.unsqueeze(-1) * write_BHV.unsqueeze(-2);
  return {state, (state * (q_BHK * scale).unsqueeze(-1)).sum(-2)};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> reference(const at::Tensor& q_NHK, const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                                             const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH,
                                             const at::Tensor& offsets, const at::Tensor& offsets_host,
                                             const std::optional<at::Tensor>& initial_state_BHKV, double scale) {
  check_arguments("kda_reference", q_NHK, k_NHK, v_NHV, decay_log_NHK, beta_NH, offsets, offsets_host,
                  initial_state_BHKV);
  const TimeMajor time = time_major(offsets_host);
  const at::Device device = q_NHK.device();
  const at::ScalarType work = q_NHK.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor rows = index_tensor(time.rows, device);
  const auto steps_of = [&](const at::Tensor& x) {
    return at::split_with_sizes(x.index_select(0, rows).to(work), time.active);
  };
  const auto q = steps_of(q_NHK), k = steps_of(k_NHK), v = steps_of(v_NHV);
  const auto decay_log = steps_of(decay_log_NHK), beta = steps_of(beta_NH);

  const auto sequences = static_cast<int64_t>(time.order.size());
  at::Tensor state =
      initial_state_BHKV.has_value()
          ? initial_state_BHKV->index_select(0, index_tensor(time.order, device)).to(work)
          : at::zeros({sequences, q_NHK.size(1), q_NHK.size(2), v_NHV.size(2)}, q_NHK.options().dtype(work));
  std::vector<at::Tensor> finished, outs;
  for (size_t t = 0; t < time.active.size(); ++t) {
    const int64_t active = time.active[t];
    if (active < state.size(0)) {
      finished.push_back(state.slice(0, active));
      state = state.slice(0, 0, active);
    }
    Step next = step(state, q[t], k[t], v[t], decay_log[t], beta[t], scale);
    state = std::move(next.state);
    outs.push_back(std::move(next.out));
  }
  finished.push_back(state);
  std::reverse(finished.begin(), finished.end());
  const at::Tensor final_state = at::cat(finished).index_select(0, index_tensor(time.inverse, device));

  const int64_t tail = q_NHK.size(0) - static_cast<int64_t>(time.rows.size());
  if (outs.empty()) return {at::zeros_like(v_NHV), final_state};
  const at::Tensor out = at::cat(outs).index_select(0, index_tensor(time.positions, device)).to(v_NHV.scalar_type());
  return {tail > 0 ? at::constant_pad_nd(out, {0, 0, 0, 0, 0, tail}) : out, final_state};
}

at::Tensor step_reference(const at::Tensor& q_BHK, const at::Tensor& k_BHK, const at::Tensor& v_BHV,
                          const at::Tensor& decay_log_BHK, const at::Tensor& beta_BH, at::Tensor state_SHKV,
                          const at::Tensor& slots_B, double scale) {
  const at::ScalarType work = state_SHKV.scalar_type();
  const Step next = step(state_SHKV.index_select(0, slots_B), q_BHK.to(work), k_BHK.to(work), v_BHV.to(work),
                         decay_log_BHK.to(work), beta_BH.to(work), scale);
  state_SHKV.index_copy_(0, slots_B, next.state);
  return next.out.to(v_BHV.scalar_type());
}

}  // namespace furlong::kda

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("kda_reference", furlong::kda::reference);
}

#ifndef FURLONG_CUDA
TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("kda_step_", furlong::kda::step_reference);
}
#endif
