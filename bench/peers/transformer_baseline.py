"""A plain pre-norm transformer (SwiGLU, RoPE, causal SDPA) as fast as eager PyTorch makes it, of as many active
parameters as the hybrid: the feed-forward width is chosen to meet --active-parameters.

    .cache/peers/bin/python bench/peers/transformer_baseline.py --dtype bf16
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from measure import CONTEXT, HEAD_SIZE, HIDDEN_SIZE, NUM_HEADS, NUM_LAYERS, VOCAB_SIZE, arguments, measure
from torch import Tensor, nn


def rotary_tables(length: int) -> tuple[Tensor, Tensor]:
    frequency = 10000.0 ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    angle = torch.outer(torch.arange(length), frequency)
    return angle.cos(), angle.sin()


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_BHTK.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_BHTK.dtype)


class Layer(nn.Module):
    def __init__(self, feed_forward: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(HIDDEN_SIZE)
        self.qkv = nn.Linear(HIDDEN_SIZE, 3 * NUM_HEADS * HEAD_SIZE, bias=False)
        self.out = nn.Linear(NUM_HEADS * HEAD_SIZE, HIDDEN_SIZE, bias=False)
        self.mlp_norm = nn.RMSNorm(HIDDEN_SIZE)
        self.gate_up = nn.Linear(HIDDEN_SIZE, 2 * feed_forward, bias=False)
        self.down = nn.Linear(feed_forward, HIDDEN_SIZE, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(rows, length, 3, NUM_HEADS, HEAD_SIZE)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(self.mlp_norm(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    def __init__(self, feed_forward: int):
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.layers = nn.ModuleList(Layer(feed_forward) for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(HIDDEN_SIZE)
        self.head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)
        cos, sin = rotary_tables(CONTEXT)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def feed_forward_for(active_parameters: int) -> int:
    """Active parameters count the head and every matrix of the layers, not the embedding lookup."""
    attention = 4 * HIDDEN_SIZE * NUM_HEADS * HEAD_SIZE
    left = active_parameters - VOCAB_SIZE * HIDDEN_SIZE - NUM_LAYERS * attention
    return max(32, round(left / (NUM_LAYERS * 3 * HIDDEN_SIZE) / 32) * 32)


def main() -> None:
    parser = arguments("transformer")
    parser.add_argument("--active-parameters", type=int, default=5_800_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer(feed_forward_for(options.active_parameters))

    def loss_of(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    active = sum(parameter.numel() for parameter in model.parameters()) - model.embed.weight.numel()
    measure("transformer", options, model, loss_of, {"active_parameters": active})


if __name__ == "__main__":
    main()
