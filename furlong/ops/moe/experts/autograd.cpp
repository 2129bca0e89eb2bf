// Autograd of the CPU's moe_experts. Other devices run the reference, which the library differentiates.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "furlong/ops/common/kernel.h"
#include "furlong/ops/moe/experts/experts_op.h"

namespace furlong::moe_experts_detail {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Five = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

struct Experts : torch::autograd::Function<Experts> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& z_NL, const at::Tensor& ids_NA,
                            const at::Tensor& weights_NA, const at::Tensor& w1_EIL, const at::Tensor& w3_EIL,
                            const at::Tensor& w2_ELI, const std::string& activation, double beta,
                            std::optional<double> linear_beta) {
    using Signature = Three(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, c10::string_view, double, std::optional<double>);
    static const auto op = find_op<Signature>("furlong::_moe_experts_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [out_NL, gate_PI, up_PI] =
        op.call(z_NL, ids_NA, weights_NA, w1_EIL, w3_EIL, w2_ELI, activation, beta, linear_beta);
    context->save_for_backward({z_NL, ids_NA, weights_NA, w1_EIL, w3_EIL, w2_ELI, gate_PI, up_PI});
    context->saved_data["activation"] = activation;
    context->saved_data["beta"] = beta;
    context->saved_data["linear_beta"] = linear_beta;
    return out_NL;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    using Signature = Five(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, c10::string_view, double, std::optional<double>);
    static const auto op = find_op<Signature>("furlong::_moe_experts_backward");
    const variable_list saved = context->get_saved_variables();
    const auto [z, weights, w1, w3, w2] =
        op.call(gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6], saved[7],
                context->saved_data["activation"].toStringView(), context->saved_data["beta"].toDouble(),
                context->saved_data["linear_beta"].toOptional<double>());
    return {z, at::Tensor(), weights, w1, w3, w2, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor with_gradient(const at::Tensor& z_NL, const at::Tensor& ids_NA, const at::Tensor& weights_NA,
                         const at::Tensor& w1_EIL, const at::Tensor& w3_EIL, const at::Tensor& w2_ELI,
                         c10::string_view activation, double beta, std::optional<double> linear_beta) {
  return Experts::apply(z_NL, ids_NA, weights_NA, w1_EIL, w3_EIL, w2_ELI, std::string(activation), beta, linear_beta);
}

}  // namespace

TORCH_LIBRARY_IMPL(furlong, AutogradCPU, m) {
  m.impl("moe_experts", with_gradient);
}

}  // namespace furlong::moe_experts_detail
