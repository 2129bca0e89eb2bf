// Attention residuals: the read, and the bookkeeping of blocks and prefix through a stack of linear layers.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>

#include <map>
#include <string>
#include <vector>

#include "furlong/ops/attnres/layer.h"
#include "furlong/ops/norm/norm.h"
#include "tests/support/golden.h"

namespace furlong::golden {
namespace {

void run_read(Case& golden) {
  const double eps = golden.info().at("constants").at("eps").get<double>();
  const at::Tensor v_SND = golden.f32("v").clone().requires_grad_(true);
  const at::Tensor norm_D = golden.f32("norm_weight").clone().requires_grad_(true);
  const at::Tensor proj_D = golden.f32("proj_weight").squeeze(0).clone().requires_grad_(true);
  const auto [out_ND, p_NS] = attnres_read(v_SND.unbind(0), norm_D * proj_D, eps);
  (out_ND * golden.f32("do")).sum().backward();
  golden.expect_close("out.o", out_ND, golden.f32("out.o"), golden.tolerance("values"));
  golden.expect_close("out.p", p_NS.t(), golden.f32("out.p"), golden.tolerance("values"));
  golden.expect_close("out.d_v", v_SND.grad(), golden.f32("out.d_v"), golden.tolerance("gradients"));
  golden.expect_close("out.d_norm", norm_D.grad(), golden.f32("out.d_norm"), golden.tolerance("gradients"));
  golden.expect_close("out.d_proj", proj_D.grad(), golden.f32("out.d_proj"), golden.tolerance("gradients"));
}

/// The stack of the case: attention and MLP are plain matrices, everything else is the product's.
class Stack {
 public:
  explicit Stack(Case& golden)
      : golden_(golden),
        layers_(golden.info().at("constants").at("layers").get<int64_t>()),
        block_size_(golden.info().at("constants").at("attn_res_block_size").get<int64_t>()),
        eps_(golden.info().at("constants").at("eps").get<double>()),
        embedding_ND_(golden.f32("embedding").clone().requires_grad_(true)) {}

  void run() {
    ResidualStream stream(embedding_ND_, block_size_);
    std::vector<at::Tensor> attention_reads, mlp_reads, prefixes;
    for (int64_t layer = 0; layer < layers_; ++layer) {
      const std::string prefix = "layers." + std::to_string(layer) + ".";
      attention_reads.push_back(stream.read(read(prefix + "self_attention_res"), nullptr));
      stream.seal_before(layer);
      stream.add(sublayer(attention_reads.back(), prefix + "input_layernorm.weight", prefix + "self_attn.weight"));
      mlp_reads.push_back(stream.read(read(prefix + "mlp_res"), nullptr));
      stream.add(sublayer(mlp_reads.back(), prefix + "post_attention_layernorm.weight", prefix + "mlp.weight"));
      prefixes.push_back(stream.prefix());
    }
    const at::Tensor last_read = stream.read(read("output_attn_res"), nullptr);
    const at::Tensor y_ND = rms_norm(last_read, golden_.f32("param.norm.weight"), eps_);
    (y_ND * golden_.f32("d_y")).sum().backward();
    expect("out.read_attn", at::stack(attention_reads));
    expect("out.read_mlp", at::stack(mlp_reads));
    expect("out.prefix", at::stack(prefixes));
    expect("out.blocks", at::stack(stream.blocks()));
    expect("out.read_output", last_read);
    expect("out.y", y_ND);
    golden_.expect_close("out.d_embedding", embedding_ND_.grad(), golden_.f32("out.d_embedding"),
                         golden_.tolerance("gradients"));
    expect_parameter_gradients();
  }

 private:
  AttnResRead read(const std::string& stem) {
    AttnResRead result(embedding_ND_.size(1), eps_);
    // Layer 0 reads nothing before its attention, so its case has no gradient for that read.
    ParamList list;
    result.declare(list, stem);
    for (const Param& param : list.params()) {
      *param.tensor = golden_.f32("param." + param.spec.name).clone().requires_grad_(true);
      parameters_[param.spec.name] = *param.tensor;
    }
    return result;
  }

  at::Tensor sublayer(const at::Tensor& x_ND, const std::string& norm, const std::string& matrix) {
    return at::matmul(rms_norm(x_ND, golden_.f32("param." + norm), eps_), golden_.f32("param." + matrix).t());
  }

  void expect(const std::string& name, const at::Tensor& got) {
    golden_.expect_close(name, got, golden_.f32(name), golden_.tolerance("values"));
  }

  void expect_parameter_gradients() {
    for (const auto& [name, parameter] : parameters_) {
      const std::string gradient = "out.d_param." + name;
      if (!golden_.has(gradient)) continue;
      golden_.expect_close(gradient, parameter.grad(), golden_.f32(gradient), golden_.tolerance("gradients"));
    }
  }

  Case& golden_;
  int64_t layers_, block_size_;
  double eps_;
  at::Tensor embedding_ND_;
  std::map<std::string, at::Tensor> parameters_;
};

void run_bookkeeping(Case& golden) {
  Stack(golden).run();
}

}  // namespace

FURLONG_GOLDEN("attnres.op", run_read);
FURLONG_GOLDEN("attnres.bookkeeping", run_bookkeeping);

}  // namespace furlong::golden
