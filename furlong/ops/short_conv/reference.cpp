// The short convolution in plain tensor operations.
//   N packed tokens   B sequences   P channels   W kernel width   T = W - 1 tail columns
//
// Every sequence gets its T rows of tail in front ("padded rows"); row t of the result reads padded rows t ... t + T.

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>

#include "furlong/ops/short_conv/internal.h"

namespace furlong::short_conv_detail {

namespace {

at::Tensor index_tensor(const std::vector<int64_t>& values, const at::Device& device) {
  const auto size = static_cast<int64_t>(values.size());
  return at::from_blob(const_cast<int64_t*>(values.data()), {size}, at::kLong).to(device, at::kLong, false, true);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> reference(const at::Tensor& x_NP, const at::Tensor& weight_PW,
                                             const at::Tensor& offsets, const at::Tensor& offsets_host,
                                             const std::optional<at::Tensor>& initial_tail_BTP) {
  check_arguments("short_conv", x_NP, weight_PW, offsets, offsets_host, initial_tail_BTP);
  const auto* starts = offsets_host.const_data_ptr<int64_t>();
  const int64_t sequences = offsets_host.numel() - 1, channels = x_NP.size(1), width = weight_PW.size(1);
  const int64_t tail = width - 1, tokens = starts[sequences];
  // Sources: the tails of all sequences, then the tokens. rows: the padded rows of all sequences, one after another.
  std::vector<int64_t> rows, firsts, tails;
  for (int64_t b = 0; b < sequences; ++b) {
    const auto first = static_cast<int64_t>(rows.size());
    for (int64_t j = 0; j < tail; ++j) rows.push_back(b * tail + j);
    for (int64_t n = starts[b]; n < starts[b + 1]; ++n) {
      firsts.push_back(first + n - starts[b]);
      rows.push_back(sequences * tail + n);
    }
    for (int64_t j = tail; j > 0; --j) tails.push_back(static_cast<int64_t>(rows.size()) - j);
  }
  const at::Tensor initial = initial_tail_BTP.has_value() ? initial_tail_BTP->reshape({sequences * tail, channels})
                                                          : at::zeros({sequences * tail, channels}, x_NP.options());
  const at::Tensor padded =
      at::cat({initial, x_NP.slice(0, 0, tokens)}).index_select(0, index_tensor(rows, x_NP.device()));
  const at::Tensor final_tail =
      padded.index_select(0, index_tensor(tails, x_NP.device())).reshape({sequences, tail, channels});

  const at::Tensor first = index_tensor(firsts, x_NP.device());
  const at::Tensor padded_work = padded.to(weight_PW.scalar_type());
  at::Tensor u = at::zeros({tokens, channels}, weight_PW.options());
  for (int64_t j = 0; j < width; ++j) u = u + padded_work.index_select(0, first + j) * weight_PW.select(1, j);
  const at::Tensor y = at::silu(u).to(x_NP.scalar_type());
  const int64_t rest = x_NP.size(0) - tokens;
  return {rest > 0 ? at::constant_pad_nd(y, {0, 0, 0, rest}) : y, final_tail};
}

at::Tensor step_reference(const at::Tensor& x_BP, const at::Tensor& weight_PW, at::Tensor tail_STP,
                          const at::Tensor& slots_B) {
  const at::Tensor window_BWP = at::cat({tail_STP.index_select(0, slots_B), x_BP.unsqueeze(1)}, 1);
  const at::Tensor u = (window_BWP.to(weight_PW.scalar_type()) * weight_PW.t()).sum(1);
  tail_STP.index_copy_(0, slots_B, window_BWP.slice(1, 1));
  return at::silu(u).to(x_BP.scalar_type());
}

}  // namespace furlong::short_conv_detail

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("short_conv_reference", furlong::short_conv_detail::reference);
}

#ifndef FURLONG_CUDA
TORCH_LIBRARY_IMPL(furlong, CUDA, m) {
  m.impl("short_conv", furlong::short_conv_detail::reference);
  m.impl("short_conv_step_", furlong::short_conv_detail::step_reference);
}
#endif
