"""The Python face of the operators: against a recurrence in fp64, opcheck, gradcheck, torch.compile. CPU; seconds."""

from __future__ import annotations

import math

import pytest
import torch

import furlong_ops
from furlong_ops.kda import chunk_kda, fused_recurrent_kda, kda_step_, kda_step_fused_

furlong_ops.load()
ops = torch.ops.furlong
H, K, V = 2, 16, 24
FUSED = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype)


def raw_inputs(B: int, T: int, heads: int = H, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(B * 1000 + T)
    return {
        "q": randn(B, T, heads, K, dtype=dtype),
        "k": randn(B, T, heads, K, dtype=dtype),
        "v": randn(B, T, heads, V, dtype=dtype),
        "g": randn(B, T, heads, K, dtype=dtype),
        "beta": randn(B, T, heads, dtype=dtype),
        "A_log": 0.3 * randn(heads),
        "dt_bias": randn(heads * K),
    }


def cut(x: dict[str, torch.Tensor], *index) -> dict[str, torch.Tensor]:
    """The tokens x[index]; parameters stay."""
    return {key: value[index] if value.dim() > 2 else value for key, value in x.items()}


def recurrence(q, k, v, g, beta, A_log, dt_bias, lower_bound, state):
    """[T, H, .] of one sequence in fp64: gate, norms and sigmoid included."""
    q, k, v, g, beta, A_log, state = (x.double() for x in (q, k, v, g, beta, A_log, state))
    z, a = g + dt_bias.double().view(g.shape[1:]), A_log.exp()[:, None]
    decay = (lower_bound * (a * z).sigmoid() if lower_bound else -a * torch.nn.functional.softplus(z)).exp()
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    out = []
    for t in range(q.shape[0]):
        state = state * decay[t][..., None]
        write = beta[t].sigmoid()[:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * write[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) / math.sqrt(K))
    return torch.stack(out), state


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    error = (got.double() - expected.double()).abs().max() / expected.abs().max()
    assert error <= tolerance, float(error)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("T", [1, 15, 33])
def test_chunk_kda_is_the_recurrence(T: int, lower_bound: float | None) -> None:
    x = raw_inputs(2, T)
    initial = randn(2, H, K, V)
    out, state = chunk_kda(**x, **FUSED, lower_bound=lower_bound, initial_state=initial, output_final_state=True)
    for b in range(2):
        expected, expected_state = recurrence(**cut(x, b), lower_bound=lower_bound, state=initial[b])
        assert_close(out[b], expected)
        assert_close(state[b], expected_state)


def test_packed_sequences_equal_each_alone() -> None:
    x = raw_inputs(1, 40)
    offsets = torch.tensor([0, 1, 18, 18, 40])
    out, state = chunk_kda(**x, **FUSED, lower_bound=-5.0, cu_seqlens=offsets, output_final_state=True)
    for b, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if first == last:
            assert state[b].abs().max() == 0
            continue
        one = cut(x, slice(None), slice(first, last))
        alone, alone_state = chunk_kda(**one, **FUSED, lower_bound=-5.0, output_final_state=True)
        assert torch.equal(out[:, first:last], alone)
        assert torch.equal(state[b], alone_state[0])


def test_value_heads_may_share_queries() -> None:
    x = raw_inputs(1, 9, heads=4)
    shared = {**x, "q": x["q"][:, :, :2], "k": x["k"][:, :, :2]}
    repeated = {**x, "q": shared["q"].repeat_interleave(2, 2), "k": shared["k"].repeat_interleave(2, 2)}
    assert torch.equal(chunk_kda(**shared, **FUSED)[0], chunk_kda(**repeated, **FUSED)[0])


def test_states_may_come_with_values_first() -> None:
    x = raw_inputs(1, 5)
    initial = randn(1, H, K, V)
    out, state = chunk_kda(**x, **FUSED, initial_state=initial, output_final_state=True)
    turned = initial.transpose(-1, -2).contiguous()
    other, other_state = chunk_kda(**x, **FUSED, initial_state=turned, output_final_state=True, state_v_first=True)
    assert torch.equal(out, other)
    assert torch.equal(state.transpose(-1, -2), other_state)


def test_given_gates_and_no_final_state() -> None:
    x = raw_inputs(1, 7)
    given = {"q": x["q"], "k": x["k"], "v": x["v"], "g": -torch.rand(1, 7, H, K), "beta": torch.rand(1, 7, H)}
    out, state = fused_recurrent_kda(**given, use_qk_l2norm_in_kernel=True)
    assert state is None
    assert out.shape == x["v"].shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_come_back(dtype: torch.dtype) -> None:
    x = raw_inputs(1, 6, dtype=dtype)
    out, state = chunk_kda(**x, **FUSED, output_final_state=True)
    assert out.dtype == dtype
    assert state.dtype == torch.float32
    assert_close(out, chunk_kda(**{key: value.float() for key, value in x.items()}, **FUSED)[0], 2e-2)


def test_refusals_say_why() -> None:
    x = raw_inputs(1, 4)
    with pytest.raises(NotImplementedError, match="cp_context"):
        chunk_kda(**x, **FUSED, cp_context=object())
    with pytest.raises(TypeError, match="colour"):
        chunk_kda(**x, **FUSED, colour="red")
    with pytest.raises(ValueError, match="batch of 1"):
        chunk_kda(**raw_inputs(2, 4), **FUSED, cu_seqlens=torch.tensor([0, 4, 8]))
    with pytest.raises(RuntimeError, match="beta"):
        chunk_kda(**{**x, "beta": x["beta"][:, :, :1]}, **FUSED)


def test_steps_continue_a_chunk() -> None:
    x = raw_inputs(3, 12)
    whole, final = chunk_kda(**x, **FUSED, lower_bound=-5.0, output_final_state=True)
    first = cut(x, slice(None), slice(0, 8))
    _, state = chunk_kda(**first, **FUSED, lower_bound=-5.0, output_final_state=True)
    pool = torch.full((7, H, K, V), 7.0)
    slots = torch.tensor([4, 0, 6])
    pool[slots] = state
    for t in range(8, 12):
        out = kda_step_fused_(pool, **cut(x, slice(None), t), lower_bound=-5.0, slots=slots)
        assert_close(out, whole[:, t], 2e-5)
    assert_close(pool[slots], final)
    assert (pool[[1, 2, 3, 5]] == 7).all()


def test_plain_step() -> None:
    q, k, v = (torch.nn.functional.normalize(randn(2, H, d), dim=-1) for d in (K, K, V))
    g, beta = -torch.rand(2, H, K), torch.rand(2, H)
    state = randn(2, H, K, V)
    decayed = state.double() * g.double().exp()[..., None]
    out = kda_step_(state, q, k, v, g, beta)
    write = beta[..., None] * (v - torch.einsum("bhkv,bhk->bhv", decayed, k.double()))
    expected = decayed + k[..., None] * write[..., None, :]
    assert_close(state, expected)
    assert_close(out, torch.einsum("bhkv,bhk->bhv", expected, q.double()) / math.sqrt(K))


def op_inputs(dtype: torch.dtype = torch.float32, gradient: bool = True, tokens: int = 9) -> list:
    """Arguments of kda_chunk: two sequences, an initial state."""
    torch.manual_seed(0)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    q, k = (torch.nn.functional.normalize(randn(tokens, H, K), dim=-1).to(dtype) for _ in range(2))
    v, g = randn(tokens, H, V, dtype=dtype), -torch.rand(tokens, H, K, dtype=work)
    beta = torch.rand(tokens, H, dtype=work)
    state = randn(2, H, K, V, dtype=work)
    for leaf in (q, k, v, g, beta, state):
        leaf.requires_grad_(gradient)
    offsets = torch.tensor([0, 2, tokens])
    return [q, k, v, g, beta, offsets, offsets.clone(), state, 0.25]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_kda_chunk(dtype: torch.dtype) -> None:
    torch.library.opcheck(ops.kda_chunk.default, op_inputs(dtype), atol=1e-2, rtol=1e-2)


def raw_op_inputs(dtype: torch.dtype = torch.float32) -> list:
    """Arguments of kda_chunk_fused."""
    q, k, v, _, _, offsets, offsets_host, state, scale = op_inputs(dtype)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    z, logit = randn(*q.shape, dtype=dtype), randn(*q.shape[:2], dtype=dtype)
    a_log, bias = randn(H, dtype=work), randn(H, K, dtype=work)
    for leaf in (z, logit, a_log, bias):
        leaf.requires_grad_()
    return [q, k, v, z, logit, a_log, bias, offsets, offsets_host, state, -5.0, scale]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_kda_chunk_fused(dtype: torch.dtype) -> None:
    torch.library.opcheck(ops.kda_chunk_fused.default, raw_op_inputs(dtype), atol=1e-2, rtol=1e-2)


def test_opcheck_steps() -> None:
    q, k, v, g, beta, _, _, _, scale = op_inputs(gradient=False)
    pool, slots = randn(10, H, K, V), torch.arange(9)
    torch.library.opcheck(ops.kda_step_.default, [q, k, v, g, beta, pool, slots, scale])
    arguments = [q, k, v, g, beta, randn(H), randn(H, K), pool, slots, -5.0, scale]
    torch.library.opcheck(ops.kda_step_fused_.default, arguments)


def test_opcheck_gates() -> None:
    z, a_log, bias = (x.requires_grad_() for x in (randn(5, H, K), randn(H), randn(H, K)))
    torch.library.opcheck(ops.kda_gate_bounded.default, [z, a_log, bias, -5.0])
    torch.library.opcheck(ops.kda_gate_softplus.default, [z, a_log, bias])


def test_opcheck_short_conv() -> None:
    offsets = torch.tensor([0, 4, 9])
    x, weight, tail = (y.requires_grad_() for y in (randn(9, 20), randn(20, 4), randn(2, 3, 20)))
    torch.library.opcheck(ops.short_conv.default, [x, weight, offsets, offsets.clone(), tail])
    token = [x[:2].detach(), weight.detach(), randn(4, 3, 20), torch.tensor([3, 0])]
    torch.library.opcheck(ops.short_conv_step_.default, token)


def test_gradcheck() -> None:
    *inputs, offsets, offsets_host, state, scale = op_inputs(torch.float64, tokens=5)

    def chunk(*x: torch.Tensor):
        return ops.kda_chunk(*x[:5], offsets, offsets_host, x[5], scale)

    assert torch.autograd.gradcheck(chunk, (*inputs, state), fast_mode=True)
    *inputs, offsets, offsets_host, state, _, scale = raw_op_inputs(torch.float64)

    def fused(*x: torch.Tensor):
        return ops.kda_chunk_fused(*x[:7], offsets, offsets_host, x[7], -5.0, scale)

    assert torch.autograd.gradcheck(fused, (*inputs, state), fast_mode=True)
    gate = [y.double().requires_grad_() for y in (randn(3, H, K), randn(H), randn(H, K))]
    assert torch.autograd.gradcheck(lambda z, a, b: ops.kda_gate_bounded(z, a, b, -5.0), gate)
    assert torch.autograd.gradcheck(ops.kda_gate_softplus, gate)


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_traces_forward_and_backward(dynamic: bool) -> None:
    def loss(x: dict[str, torch.Tensor]) -> torch.Tensor:
        out, state = chunk_kda(**x, **FUSED, lower_bound=-5.0, output_final_state=True)
        return out.square().mean() + state.square().mean()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for T in (6, 11):
        gradients = []
        for run in (loss, compiled):
            x = {key: value.detach().clone().requires_grad_() for key, value in raw_inputs(2, T).items()}
            run(x).backward()
            gradients.append([value.grad for value in x.values()])
        for eager, traced in zip(*gradients, strict=True):
            assert torch.allclose(eager, traced, rtol=1e-5, atol=1e-6)
