#!/usr/bin/env python3
"""A Kimi-K3 folder of the published size in sparse files: 96 shards, 497,220 tensors, 1.56 TB apparent, 130 MB on disk.

    tools/sparse_checkpoint.py out/sparse-k3

Headers, index and config.json are complete and valid; every weight reads as zero. For measuring what indexing,
validating and planning cost at the real size. Names and shapes are those of the published form.
"""

import json
import os
import struct
import sys

DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1}

HIDDEN, VOCAB, LAYERS, DENSE = 7168, 163840, 93, 33792
HEADS, HEAD, Q_RANK, KV_RANK, ROPE = 96, 128, 1536, 512, 64
EXPERTS, EXPERT, LATENT, SHARED = 896, 3072, 3584, 2
FULL_ATTENTION = sorted([*range(4, 93, 4), 93])
VISION_BLOCKS = 27

TEXT_CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "num_experts": EXPERTS,
    "num_experts_per_token": 16,
    "num_shared_experts": SHARED,
    "moe_intermediate_size": EXPERT,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "routed_expert_hidden_size": LATENT,
    "latent_moe_use_norm": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "attn_res_block_size": 12,
    "num_nextn_predict_layers": 0,
    "linear_attn_config": {
        "head_dim": HEAD,
        "num_heads": HEADS,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "kda_layers": [n for n in range(1, LAYERS + 1) if n not in FULL_ATTENTION],
        "full_attn_layers": FULL_ATTENTION,
    },
    "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "torch_dtype": "bfloat16",
}


def kda():
    wide = HEADS * HEAD
    for name in "qkv":
        yield f"{name}_proj.weight", "BF16", [wide, HIDDEN]
        yield f"{name}_conv1d.weight", "F32", [wide, 1, 4]
    yield "f_a_proj.weight", "BF16", [HEAD, HIDDEN]
    yield "f_b_proj.weight", "BF16", [wide, HEAD]
    yield "b_proj.weight", "BF16", [HEADS, HIDDEN]
    yield "g_proj.weight", "BF16", [wide, HIDDEN]
    yield "A_log", "F32", [128]
    yield "dt_bias", "F32", [wide]
    yield "o_norm.weight", "F32", [HEAD]
    yield "o_proj.weight", "BF16", [HIDDEN, wide]


def mla():
    wide = HEADS * 128
    yield "q_a_proj.weight", "BF16", [Q_RANK, HIDDEN]
    yield "q_a_layernorm.weight", "BF16", [Q_RANK]
    yield "q_b_proj.weight", "BF16", [HEADS * (128 + ROPE), Q_RANK]
    yield "kv_a_proj_with_mqa.weight", "BF16", [KV_RANK + ROPE, HIDDEN]
    yield "kv_a_layernorm.weight", "BF16", [KV_RANK]
    yield "kv_b_proj.weight", "BF16", [2 * wide, KV_RANK]
    yield "g_proj.weight", "BF16", [wide, HIDDEN]
    yield "o_proj.weight", "BF16", [HIDDEN, wide]


def gated_mlp(prefix, width):
    yield f"{prefix}gate_proj.weight", "BF16", [width, HIDDEN]
    yield f"{prefix}up_proj.weight", "BF16", [width, HIDDEN]
    yield f"{prefix}down_proj.weight", "BF16", [HIDDEN, width]


def experts():
    yield "gate.weight", "BF16", [EXPERTS, HIDDEN]
    yield "gate.e_score_correction_bias", "F32", [EXPERTS]
    yield from gated_mlp("shared_experts.", SHARED * EXPERT)
    yield "routed_expert_down_proj.weight", "BF16", [LATENT, HIDDEN]
    yield "routed_expert_up_proj.weight", "BF16", [HIDDEN, LATENT]
    yield "routed_expert_norm.weight", "BF16", [LATENT]
    for expert in range(EXPERTS):
        for name, out, into in (("w1", EXPERT, LATENT), ("w3", EXPERT, LATENT), ("w2", LATENT, EXPERT)):
            yield f"experts.{expert}.{name}.weight_packed", "U8", [out, into // 2]
            yield f"experts.{expert}.{name}.weight_scale", "U8", [out, into // 32]


def layer(index):
    prefix = f"language_model.model.layers.{index}."
    for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
        yield f"{prefix}{name}.weight", "BF16", [HIDDEN]
    for name in ("self_attention_res_proj", "mlp_res_proj"):
        yield f"{prefix}{name}.weight", "BF16", [1, HIDDEN]
    for name, dtype, shape in mla() if index + 1 in FULL_ATTENTION else kda():
        yield f"{prefix}self_attn.{name}", dtype, shape
    feed_forward = gated_mlp("mlp.", DENSE) if index == 0 else (
        (f"block_sparse_moe.{name}", dtype, shape) for name, dtype, shape in experts())
    for name, dtype, shape in feed_forward:
        yield prefix + name, dtype, shape


def ends():
    yield "language_model.model.embed_tokens.weight", "BF16", [VOCAB, HIDDEN]
    yield "language_model.lm_head.weight", "BF16", [VOCAB, HIDDEN]
    yield "language_model.model.norm.weight", "BF16", [HIDDEN]
    yield "language_model.model.output_attn_res_norm.weight", "BF16", [HIDDEN]
    yield "language_model.model.output_attn_res_proj.weight", "BF16", [1, HIDDEN]


def tower():
    yield "vision_tower.patch_embed.proj.weight", "BF16", [1024, 3, 14, 14]
    yield "vision_tower.patch_embed.pos_emb.weight", "BF16", [64, 64, 1024]
    for block in range(VISION_BLOCKS):
        prefix = f"vision_tower.encoder.blocks.{block}."
        for name, shape in (("norm0", [1024]), ("norm1", [1024]), ("wqkv", [4608, 1024]), ("wo", [1024, 1536]),
                            ("mlp.fc0", [4096, 1024]), ("mlp.fc1", [1024, 4096])):
            yield f"{prefix}{name}.weight", "BF16", shape
    yield "vision_tower.encoder.final_layernorm.weight", "BF16", [1024]


def projector():
    yield "mm_projector.proj.0.weight", "BF16", [4096, 4096]
    yield "mm_projector.proj.2.weight", "BF16", [HIDDEN, 4096]
    yield "mm_projector.post_norm.weight", "BF16", [HIDDEN]


def write_shard(path, tensors):
    """Header and length; the data are a hole. Returns the bytes of the data."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in tensors:
        size = DTYPE_BYTES[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return offset


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    shards = [*(list(layer(index)) for index in range(LAYERS)), list(ends()), list(tower()), list(projector())]
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += write_shard(os.path.join(folder, name), tensors)
        weight_map.update((tensor, name) for tensor, _, _ in tensors)
    config = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": TEXT_CONFIG,
              "media_placeholder_token_id": 163605, "tie_word_embeddings": False}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, value in (("config.json", config), ("model.safetensors.index.json", index)):
        with open(os.path.join(folder, name), "w") as file:
            json.dump(value, file)
    print(f"{folder}: {len(shards)} shards, {len(weight_map)} tensors, {total / 1e12:.3f} TB apparent")


if __name__ == "__main__":
    main()
