#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/maximum.h>

#include <algorithm>
#include <limits>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/common/linear.h"
#include "furlong/ops/mla/layer_blocked.h"

namespace furlong {

namespace {

/// Rows of queries and of keys handled together. Exact: small, so that short sequences waste little, and a multiple of
/// linear's own row blocks. Fast: a score block of H x 512 x 1024 stays in the tens of megabytes.
struct BlockRows {
  int64_t queries, keys;
};
constexpr BlockRows kExactBlocks{kExactRows, 256};
constexpr BlockRows kFastBlocks{512, 1024};

/// Running softmax of one block of queries: numerator, denominator and the maximum they are relative to.
struct Merge {
  int64_t first_position;  // of row 0; rows stand at consecutive positions
  at::Tensor q_HTQ;        // scaled
  at::Tensor numerator_HTV, denominator_HT1, maximum_HT1;
};

struct KeyBlock {
  int64_t first_position;
  at::Tensor k_HQC, v_HCV;
};

KeyBlock expand_keys(const at::Tensor& context_CE, int64_t first, int64_t rows, const at::Tensor& kv_b,
                     const MlaWidths& widths, Numerics numerics, at::ScalarType wide) {
  const int64_t present = std::min(rows, context_CE.size(0) - first);
  const bool pad = numerics == Numerics::kExact && present < rows;
  const at::Tensor some_CE = context_CE.narrow(0, first, present);
  const at::Tensor entries_CE = pad ? at::constant_pad_nd(some_CE, {0, 0, 0, rows - present}) : some_CE;
  const at::Tensor latent_CL = entries_CE.narrow(1, 0, widths.latent);
  const at::Tensor kv_HCX = linear(latent_CL, kv_b, numerics)
                                .view({entries_CE.size(0), widths.num_heads, widths.nope + widths.value})
                                .transpose(0, 1);
  const at::Tensor shared_HCR = entries_CE.narrow(1, widths.latent, widths.shared_key)
                                    .unsqueeze(0)
                                    .expand({widths.num_heads, entries_CE.size(0), widths.shared_key});
  const at::Tensor k_HCQ = at::cat({kv_HCX.narrow(2, 0, widths.nope), shared_HCR}, 2).to(wide);
  return {first, k_HCQ.transpose(1, 2), kv_HCX.narrow(2, widths.nope, widths.value).to(wide).contiguous()};
}

void absorb(Merge& merge, const KeyBlock& block) {
  const int64_t queries = merge.q_HTQ.size(1), keys = block.k_HQC.size(2);
  at::Tensor scores_HTC = at::bmm(merge.q_HTQ, block.k_HQC);
  if (block.first_position + keys - 1 > merge.first_position) {
    const auto positions = [&](int64_t first, int64_t count) {
      return at::arange(first, first + count, scores_HTC.options().dtype(at::kLong));
    };
    const at::Tensor hidden_TC =
        positions(block.first_position, keys).unsqueeze(0) > positions(merge.first_position, queries).unsqueeze(1);
    scores_HTC = scores_HTC.masked_fill(hidden_TC, -std::numeric_limits<double>::infinity());
  }
  // A block without a visible key leaves every number as it is: p = 0 and the factor is exp(0). The maximum cancels
  // in the quotient, so it carries no gradient. Block 0 shows every query its first key, so it is never infinite.
  const at::Tensor block_maximum = scores_HTC.detach().amax(-1, /*keepdim=*/true);
  const bool first = !merge.maximum_HT1.defined();
  const at::Tensor maximum = first ? block_maximum : at::maximum(merge.maximum_HT1, block_maximum);
  const at::Tensor p_HTC = (scores_HTC - maximum).exp();
  const at::Tensor numerator = at::bmm(p_HTC, block.v_HCV), denominator = p_HTC.sum(-1, /*keepdim=*/true);
  if (first) {
    merge.numerator_HTV = numerator;
    merge.denominator_HT1 = denominator;
  } else {
    const at::Tensor factor = (merge.maximum_HT1 - maximum).exp();
    merge.numerator_HTV = merge.numerator_HTV * factor + numerator;
    merge.denominator_HT1 = merge.denominator_HT1 * factor + denominator;
  }
  merge.maximum_HT1 = maximum;
}

/// Query blocks. Exact: borders at multiples of the block size counted from the sequence's first token, first and last
/// block filled up with zero rows.
std::vector<Merge> split_queries(const at::Tensor& q_HTQ, int64_t past, int64_t rows, bool exact) {
  const int64_t before = exact ? past % rows : 0;
  const int64_t total = before + q_HTQ.size(1);
  const int64_t after = exact ? (rows - total % rows) % rows : 0;
  const at::Tensor padded_HTQ = before + after > 0 ? at::constant_pad_nd(q_HTQ, {0, 0, before, after}) : q_HTQ;
  std::vector<Merge> merges;
  for (int64_t first = 0; first < padded_HTQ.size(1); first += rows) {
    const int64_t count = std::min(rows, padded_HTQ.size(1) - first);
    merges.push_back({past - before + first, padded_HTQ.narrow(1, first, count).contiguous(), {}, {}, {}});
  }
  return merges;
}

}  // namespace

at::Tensor mla_blocked_attention(const at::Tensor& q_THQ, const at::Tensor& context_CE, const at::Tensor& kv_b,
                                 int64_t past, const MlaWidths& widths, double scale, Numerics numerics) {
  const bool exact = numerics == Numerics::kExact;
  const BlockRows rows = exact ? kExactBlocks : kFastBlocks;
  const at::ScalarType wide = arithmetic_type(q_THQ);
  const at::Tensor q_HTQ = q_THQ.to(wide).transpose(0, 1) * scale;
  std::vector<Merge> merges = split_queries(q_HTQ, past, rows.queries, exact);
  for (int64_t first = 0; first < context_CE.size(0); first += rows.keys) {
    const KeyBlock block = expand_keys(context_CE, first, rows.keys, kv_b, widths, numerics, wide);
    for (Merge& merge : merges) {
      if (merge.first_position + merge.q_HTQ.size(1) > first) absorb(merge, block);
    }
  }
  std::vector<at::Tensor> parts;
  for (const Merge& merge : merges) parts.push_back(merge.numerator_HTV / merge.denominator_HT1);
  const int64_t before = exact ? past % rows.queries : 0;
  return at::cat(parts, 1).narrow(1, before, q_THQ.size(0)).transpose(0, 1);
}

}  // namespace furlong
