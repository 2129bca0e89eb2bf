// moe_experts on the CPU. Pairs are sorted by expert; each expert's products are library calls on a slice of one
// buffer for all experts, several experts at a time with one thread each.
//   N tokens   A chosen   E experts   P places of the pairs sorted by expert   L input width   I expert width
//
// forward    g = z W1^T     u = z W3^T     h = act(g, u)     y = h W2^T     out_n = sum_a w_na y_na
// backward   q = dout W2 (the gradient of w h)     dw = <q, h>     dh = w q     dW2 = dout^T (w h)
//            (dg, du) = act'(dh)     dW1 = dg^T z     dW3 = du^T z     dz_n = sum_a (dg W1 + du W3)_na
// y is not needed backward: <dout, y> = <dout W2, h>. Saved: g and u.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include "furlong/base/parallel.h"
#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/moe/experts/experts_op.h"
#include "furlong/ops/moe/experts/pairs.h"
#include "furlong/ops/moe/experts/rows.h"

namespace furlong::moe_experts_detail {

namespace {

/// Rows of one library call: large enough for the library's blocking, small enough to spread a crowded expert.
constexpr int64_t kRowsPerTask = 512;

/// Runs body(task) for every task. Within a thread the library's products run single-threaded, so that results do not
/// depend on the number of threads.
template <typename Body>
void for_each_task(int64_t num_tasks, const Body& body) {
  parallel_for(0, num_tasks, 1, [&](int64_t first, int64_t last) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;  // per thread
    for (int64_t task = first; task < last; ++task) body(task);
  });
}

at::Tensor slice(const at::Tensor& x, const RowBlock& block) {
  return x.narrow(0, block.start, block.rows);
}

RowBlock all_rows(const Pairs& pairs, int64_t expert) {
  return {expert, pairs.offset_of_expert[expert], pairs.rows(expert)};
}

struct Weights {
  at::Tensor w1_EIL, w3_EIL, w2_ELI;
};

Weights in_dtype(const at::Tensor& w1_EIL, const at::Tensor& w3_EIL, const at::Tensor& w2_ELI, at::ScalarType dtype) {
  return {w1_EIL.to(dtype).contiguous(), w3_EIL.to(dtype).contiguous(), w2_ELI.to(dtype).contiguous()};
}

/// The output, and what backward needs: gate and up, [P, I].
std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_cpu(const at::Tensor& z_in, const at::Tensor& ids_NA,
                                                           const at::Tensor& weights_in, const at::Tensor& w1_EIL,
                                                           const at::Tensor& w3_EIL, const at::Tensor& w2_ELI,
                                                           c10::string_view activation_name, double beta,
                                                           std::optional<double> linear_beta) {
  check(z_in, ids_NA, weights_in, w1_EIL, w3_EIL, w2_ELI);
  const Activation activation = make_activation(activation_name, beta, linear_beta);
  const at::Tensor z_NL = z_in.contiguous(), weights_NA = weights_in.contiguous();
  const Weights weights = in_dtype(w1_EIL, w3_EIL, w2_ELI, z_NL.scalar_type());
  const Pairs pairs = sort_pairs(ids_NA, w1_EIL.size(0));
  const std::vector<RowBlock> blocks = row_blocks(pairs, kRowsPerTask);
  const auto num_blocks = static_cast<int64_t>(blocks.size());

  const at::Tensor z_PL = gather_rows(z_NL, pairs);
  at::Tensor gate_PI = at::empty({pairs.num_places(), w1_EIL.size(1)}, z_NL.options());
  at::Tensor up_PI = at::empty_like(gate_PI), y_PL = at::empty_like(z_PL);
  for_each_task(num_blocks, [&](int64_t task) {
    const RowBlock& block = blocks[task];
    at::Tensor gate = slice(gate_PI, block), up = slice(up_PI, block);
    at::mm_out(gate, slice(z_PL, block), weights.w1_EIL[block.expert].t());
    at::mm_out(up, slice(z_PL, block), weights.w3_EIL[block.expert].t());
  });
  const at::Tensor hidden_PI = activation(gate_PI, up_PI);
  for_each_task(num_blocks, [&](int64_t task) {
    at::Tensor y = slice(y_PL, blocks[task]);
    at::mm_out(y, slice(hidden_PI, blocks[task]), weights.w2_ELI[blocks[task].expert].t());
  });
  return {combine_rows(y_PL, weights_NA, pairs, z_NL.size(0)), gate_PI, up_PI};
}

at::Tensor experts_cpu(const at::Tensor& z_NL, const at::Tensor& ids_NA, const at::Tensor& weights_NA,
                       const at::Tensor& w1_EIL, const at::Tensor& w3_EIL, const at::Tensor& w2_ELI,
                       c10::string_view activation, double beta, std::optional<double> linear_beta) {
  return std::get<0>(forward_cpu(z_NL, ids_NA, weights_NA, w1_EIL, w3_EIL, w2_ELI, activation, beta, linear_beta));
}

/// h = act(g, u), able to give the gradients of g and u: the activation is its own operator, with its own backward.
struct ActivationGraph {
  at::Tensor gate_PI, up_PI, hidden_PI;

  ActivationGraph(const Activation& activation, const at::Tensor& gate, const at::Tensor& up)
      : gate_PI(gate.detach().requires_grad_()), up_PI(up.detach().requires_grad_()) {
    const at::AutoGradMode with_gradient(true);
    hidden_PI = activation(gate_PI, up_PI);
  }
  /// d gate, d up.
  std::vector<at::Tensor> backward(const at::Tensor& grad_PI) const {
    return torch::autograd::grad({hidden_PI}, {gate_PI, up_PI}, {grad_PI});
  }
};

/// out = a^T b over all rows of one expert: the gradient of that expert's matrix, in the matrix's own dtype. An expert
/// without tokens gets zeros.
void weight_gradient(at::Tensor out, const at::Tensor& a, const at::Tensor& b) {
  if (a.size(0) == 0) {
    out.zero_();
  } else if (out.scalar_type() == a.scalar_type()) {
    at::mm_out(out, a.t(), b);
  } else {
    out.copy_(at::mm(a.t(), b));
  }
}

/// Gradients of z, weights, w1, w3, w2.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward_cpu(
    const at::Tensor& grad_out, const at::Tensor& z_in, const at::Tensor& ids_NA, const at::Tensor& weights_in,
    const at::Tensor& w1_EIL, const at::Tensor& w3_EIL, const at::Tensor& w2_ELI, const at::Tensor& gate_PI,
    const at::Tensor& up_PI, c10::string_view activation_name, double beta, std::optional<double> linear_beta) {
  const at::NoGradGuard no_grad;
  const Activation activation = make_activation(activation_name, beta, linear_beta);
  const at::Tensor z_NL = z_in.contiguous(), weights_NA = weights_in.contiguous();
  const Weights weights = in_dtype(w1_EIL, w3_EIL, w2_ELI, z_NL.scalar_type());
  const Pairs pairs = sort_pairs(ids_NA, w1_EIL.size(0));
  const std::vector<RowBlock> blocks = row_blocks(pairs, kRowsPerTask);
  const auto num_blocks = static_cast<int64_t>(blocks.size());

  const at::Tensor z_PL = gather_rows(z_NL, pairs), grad_PL = gather_rows(grad_out.contiguous(), pairs);
  const ActivationGraph graph(activation, gate_PI, up_PI);
  at::Tensor grad_PI = at::empty_like(gate_PI);
  for_each_task(num_blocks, [&](int64_t task) {
    at::Tensor grad = slice(grad_PI, blocks[task]);
    at::mm_out(grad, slice(grad_PL, blocks[task]), weights.w2_ELI[blocks[task].expert]);
  });
  const WeightedHidden weighted = weigh_hidden(graph.hidden_PI.detach(), grad_PI, weights_NA, pairs);
  const std::vector<at::Tensor> grads = graph.backward(grad_PI);
  const at::Tensor grad_gate_PI = grads[0].contiguous(), grad_up_PI = grads[1].contiguous();

  at::Tensor grad_z_PL = at::empty_like(z_PL);
  for_each_task(num_blocks, [&](int64_t task) {
    const RowBlock& block = blocks[task];
    at::Tensor grad_z = slice(grad_z_PL, block);
    at::mm_out(grad_z, slice(grad_gate_PI, block), weights.w1_EIL[block.expert]);
    grad_z.addmm_(slice(grad_up_PI, block), weights.w3_EIL[block.expert]);
  });
  at::Tensor grad_w1 = at::empty_like(w1_EIL, at::MemoryFormat::Contiguous);
  at::Tensor grad_w3 = at::empty_like(w3_EIL, at::MemoryFormat::Contiguous);
  at::Tensor grad_w2 = at::empty_like(w2_ELI, at::MemoryFormat::Contiguous);
  for_each_task(3 * pairs.num_experts(), [&](int64_t task) {
    const RowBlock rows = all_rows(pairs, task / 3);
    if (task % 3 == 0) weight_gradient(grad_w1[rows.expert], slice(grad_gate_PI, rows), slice(z_PL, rows));
    if (task % 3 == 1) weight_gradient(grad_w3[rows.expert], slice(grad_up_PI, rows), slice(z_PL, rows));
    if (task % 3 == 2)
      weight_gradient(grad_w2[rows.expert], slice(grad_PL, rows), slice(weighted.weighted_hidden_PI, rows));
  });
  return {combine_rows(grad_z_PL, {}, pairs, z_NL.size(0)), weighted.grad_weights_NA, grad_w1, grad_w3, grad_w2};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def(
      "_moe_experts_forward(Tensor z, Tensor ids, Tensor weights, Tensor w1, Tensor w3, Tensor w2, str activation, "
      "float beta, float? linear_beta) -> (Tensor out, Tensor gate, Tensor up)");
  m.def(
      "_moe_experts_backward(Tensor grad, Tensor z, Tensor ids, Tensor weights, Tensor w1, Tensor w3, Tensor w2, "
      "Tensor gate, Tensor up, str activation, float beta, float? linear_beta) -> (Tensor z, Tensor weights, "
      "Tensor w1, Tensor w3, Tensor w2)");
}

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("moe_experts", experts_cpu);
  m.impl("_moe_experts_forward", forward_cpu);
  m.impl("_moe_experts_backward", backward_cpu);
}

}  // namespace furlong::moe_experts_detail
