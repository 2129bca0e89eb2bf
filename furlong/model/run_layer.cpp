#include "furlong/model/run_layer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace furlong {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A layer with everything but its input tensors.
struct LayerCall : torch::CustomClassHolder {
  const DecoderLayer* layer = nullptr;
  int64_t attnres_block_size = 0;
  int64_t num_sources = 0;
  SequenceLayout layout;
  ForwardContext context;

  /// `sources`: the sealed blocks, then the prefix. Returns the prefix after the layer.
  at::Tensor operator()(variable_list sources_ND) const {
    const at::Tensor prefix_ND = sources_ND.back();
    sources_ND.pop_back();
    ResidualStream stream(std::move(sources_ND), prefix_ND, attnres_block_size);
    layer->forward(stream, layout, nullptr, context);
    return stream.prefix();
  }
};

struct RecomputedLayer : torch::autograd::Function<RecomputedLayer> {
  /// `tensors`: the sources, then the layer's parameters (which the layer holds itself; they stand here so that
  /// autograd knows of them).
  static at::Tensor forward(AutogradContext* ctx, const c10::intrusive_ptr<LayerCall>& call, at::TensorList tensors) {
    const variable_list sources_ND(tensors.begin(), tensors.begin() + call->num_sources);
    LayerRecord own_record;
    if (call->context.record == nullptr && call->layer->moe() != nullptr) call->context.record = &own_record;
    const at::Tensor prefix_ND = (*call)(sources_ND);
    // A replayed choice, and no second count for the balance histogram.
    if (call->context.record != nullptr) call->context.forced_expert_ids_NA = call->context.record->expert_ids_NA;
    call->context.training = false;
    call->context.record = nullptr;
    ctx->save_for_backward(sources_ND);
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    return prefix_ND;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto call = c10::static_intrusive_pointer_cast<LayerCall>(ctx->saved_data["call"].toCapsule());
    variable_list inputs;
    for (const at::Tensor& source : ctx->get_saved_variables()) {
      inputs.push_back(source.detach().set_requires_grad(source.requires_grad()));
    }
    const at::AutoGradMode enable_grad(true);
    const at::Tensor prefix_ND = (*call)(inputs);
    for (const at::Tensor* parameter : call->layer->tensors()) inputs.push_back(*parameter);
    return grads_of(prefix_ND, inputs, grad_outputs[0]);
  }

 private:
  /// One gradient for each input, undefined where it needs none, behind the undefined one of the LayerCall argument.
  static variable_list grads_of(const at::Tensor& output, const variable_list& inputs, const at::Tensor& grad_output) {
    variable_list wanted;
    for (const at::Tensor& input : inputs) {
      if (input.requires_grad()) wanted.push_back(input);
    }
    const variable_list found = torch::autograd::grad({output}, wanted, {grad_output}, /*retain_graph=*/std::nullopt,
                                                      /*create_graph=*/false, /*allow_unused=*/true);
    variable_list grads(1 + inputs.size());
    size_t next = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].requires_grad()) grads[1 + i] = found[next++];
    }
    return grads;
  }
};

}  // namespace

ResidualStream run_layer(const DecoderLayer& layer, const ResidualStream& stream, int64_t attnres_block_size,
                         const SequenceLayout& layout, const ForwardContext& context, bool recompute) {
  variable_list sources_ND = stream.blocks();
  sources_ND.push_back(stream.prefix());
  const auto call = c10::make_intrusive<LayerCall>();
  call->layer = &layer;
  call->attnres_block_size = attnres_block_size;
  call->num_sources = static_cast<int64_t>(sources_ND.size());
  call->layout = layout;
  call->context = context;

  at::Tensor prefix_ND;
  if (recompute) {
    variable_list tensors = sources_ND;
    for (const at::Tensor* parameter : layer.tensors()) tensors.push_back(*parameter);
    prefix_ND = RecomputedLayer::apply(call, at::TensorList(tensors));
  } else {
    // An alias per layer and source: the layer's reads of a source are summed before they meet those of other layers.
    for (at::Tensor& source_ND : sources_ND) source_ND = at::alias(source_ND);
    prefix_ND = (*call)(std::move(sources_ND));
  }
  ResidualStream after = stream;
  if (attnres_block_size > 0) after.seal_before(layer.index());
  return ResidualStream(after.blocks(), prefix_ND, attnres_block_size);
}

}  // namespace furlong
