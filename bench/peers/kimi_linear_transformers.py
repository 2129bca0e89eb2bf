"""The `kimi_linear` model of transformers 5.x at the shape of the training-speed comparison: 8 layers, three KDA to one
MLA, 32 experts of width 96 with 4 chosen and one shared, first layer dense. Eager PyTorch, as it runs on a CPU.

    .cache/peers/bin/python bench/peers/kimi_linear_transformers.py --dtype bf16 --steps 1
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from measure import CONTEXT, HEAD_SIZE, HIDDEN_SIZE, NUM_HEADS, NUM_LAYERS, VOCAB_SIZE, arguments, measure
from torch import Tensor
from transformers import KimiLinearConfig, KimiLinearForCausalLM

NUM_EXPERTS, NUM_CHOSEN, EXPERT_SIZE = 32, 4, 96


def main() -> None:
    options = arguments("kimi_linear of transformers").parse_args()
    torch.manual_seed(0)
    config = KimiLinearConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        linear_num_heads=NUM_HEADS,
        linear_head_dim=HEAD_SIZE,
        layer_types=["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(NUM_LAYERS)],
        mlp_layer_types=["dense"] + ["sparse"] * (NUM_LAYERS - 1),
        intermediate_size=NUM_CHOSEN * EXPERT_SIZE + EXPERT_SIZE,
        moe_intermediate_size=EXPERT_SIZE,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_CHOSEN,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        kv_lora_rank=HEAD_SIZE,
        qk_nope_head_dim=HEAD_SIZE - HEAD_SIZE // 4,
        qk_rope_head_dim=HEAD_SIZE // 4,
        v_head_dim=HEAD_SIZE,
        max_position_embeddings=CONTEXT,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = KimiLinearForCausalLM(config).train()
    routed = sum(parameter.numel() for name, parameter in model.named_parameters() if ".mlp.experts." in name)
    total = sum(parameter.numel() for parameter in model.parameters())
    active = total - model.get_input_embeddings().weight.numel() - routed * (NUM_EXPERTS - NUM_CHOSEN) // NUM_EXPERTS

    def loss_of(tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    measure("kimi_linear", options, model, loss_of, {"active_parameters": active})


if __name__ == "__main__":
    main()
