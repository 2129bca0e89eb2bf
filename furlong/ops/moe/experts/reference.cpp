// moe_experts in plain tensor operations: the oracle, and the path of every device without a kernel of its own.
//   N tokens   A chosen   E experts   P = N A (token, expert) pairs, sorted by expert   L input width   I expert width

#include <ATen/TensorOperators.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <torch/library.h>

#include "furlong/ops/common/index_counts.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/moe/experts/experts_op.h"

namespace furlong::moe_experts_detail {

namespace {

at::Tensor reference(const at::Tensor& z_NL, const at::Tensor& ids_NA, const at::Tensor& weights_NA,
                     const at::Tensor& w1_EIL, const at::Tensor& w3_EIL, const at::Tensor& w2_ELI,
                     c10::string_view activation_name, double beta, std::optional<double> linear_beta) {
  check(z_NL, ids_NA, weights_NA, w1_EIL, w3_EIL, w2_ELI);
  const Activation activation = make_activation(activation_name, beta, linear_beta);
  const int64_t num_chosen = ids_NA.size(1), num_experts = w1_EIL.size(0);
  const at::Tensor pair_expert = ids_NA.reshape(-1);
  const at::Tensor order_P = at::argsort(pair_expert, /*stable=*/true);
  const at::Tensor z_PL = z_NL.index_select(0, order_P.div(num_chosen, "floor"));
  const at::Tensor counts = index_counts(pair_expert, num_experts).cpu();
  std::vector<at::Tensor> results;
  int64_t start = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t count = counts[e].item<int64_t>();
    const at::Tensor z_e = z_PL.narrow(0, start, count);
    const auto product = [&](const at::Tensor& x, const at::Tensor& weight) {
      return at::matmul(x, weight[e].to(x.scalar_type()).t());
    };
    results.push_back(product(activation(product(z_e, w1_EIL), product(z_e, w3_EIL)), w2_ELI));
    start += count;
  }
  const at::Tensor y_NAL = at::cat(results).index_select(0, at::argsort(order_P)).view({-1, num_chosen, z_NL.size(1)});
  return (y_NAL.to(arithmetic_type(z_NL)) * weights_NA.unsqueeze(-1)).sum(1).to(z_NL.scalar_type());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def(
      "moe_experts_reference(Tensor z, Tensor ids, Tensor weights, Tensor w1, Tensor w3, Tensor w2, str activation, "
      "float beta, float? linear_beta) -> Tensor");
}

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("moe_experts_reference", reference);
  m.impl("moe_experts", reference);
}

}  // namespace furlong::moe_experts_detail
