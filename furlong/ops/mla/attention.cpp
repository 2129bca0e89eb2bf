// mla_attention on every device: the library's fused attention, one call for each run of equally long sequences.
//   N packed tokens   H heads   Q key size   V value size
//
// Composite, so autograd differentiates it through the library's own backward.

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "furlong/base/shape.h"
#include "furlong/ops/mla/mla_op.h"

namespace furlong::mla_detail {

namespace {

/// `count` sequences of `length` tokens each, from row `start`.
struct Run {
  int64_t start, count, length;
};

std::vector<Run> find_runs(const at::Tensor& offsets_host) {
  const int64_t* offsets = offsets_host.const_data_ptr<int64_t>();
  std::vector<Run> runs;
  for (int64_t b = 0; b + 1 < offsets_host.size(0); ++b) {
    const int64_t length = offsets[b + 1] - offsets[b];
    if (length == 0) continue;
    if (!runs.empty() && runs.back().length == length) {
      ++runs.back().count;
    } else {
      runs.push_back({offsets[b], 1, length});
    }
  }
  return runs;
}

at::Tensor attend(const Run& run, const at::Tensor& q_NHQ, const at::Tensor& k_NHQ, const at::Tensor& v_NHV,
                  double scale) {
  const auto batch = [&](const at::Tensor& x) {
    return x.narrow(0, run.start, run.count * run.length)
        .view({run.count, run.length, x.size(1), x.size(2)})
        .transpose(1, 2);
  };
  // Queries and keys start together here, so the library's top-left causal mask is the right one.
  const at::Tensor out_BHTV = at::scaled_dot_product_attention(batch(q_NHQ), batch(k_NHQ), batch(v_NHV), {},
                                                               /*dropout_p=*/0.0, /*is_causal=*/true, scale);
  return out_BHTV.transpose(1, 2).reshape({run.count * run.length, v_NHV.size(1), v_NHV.size(2)});
}

at::Tensor attention(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                     const at::Tensor& offsets_host, double scale) {
  check_attention(q_in, k_in, v_in, offsets_host);
  const int64_t tokens = offsets_host[-1].item<int64_t>();
  check_argument(tokens <= q_in.size(0), "mla_attention",
                 "q_NHQ: got " + std::to_string(q_in.size(0)) + " rows for " + std::to_string(tokens) + " tokens");
  const int64_t key_size = q_in.size(2), value_size = v_in.size(2);
  // The CPU's fused kernel needs one width; without padding the library falls back to whole score matrices.
  const bool pad = v_in.is_cpu() && value_size < key_size;
  const at::Tensor q_NHQ = q_in.contiguous(), k_NHQ = k_in.contiguous();
  const at::Tensor v_NHV = pad ? at::constant_pad_nd(v_in, {0, key_size - value_size}) : v_in.contiguous();
  std::vector<at::Tensor> parts;
  for (const Run& run : find_runs(offsets_host)) parts.push_back(attend(run, q_NHQ, k_NHQ, v_NHV, scale));
  if (tokens < q_in.size(0) || parts.empty()) {
    parts.push_back(at::zeros({q_in.size(0) - tokens, v_NHV.size(1), v_NHV.size(2)}, v_NHV.options()));
  }
  const at::Tensor out = parts.size() == 1 ? parts[0] : at::cat(parts);
  return pad ? out.narrow(2, 0, value_size) : out;
}

}  // namespace

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("mla_attention", attention);
}

}  // namespace furlong::mla_detail
