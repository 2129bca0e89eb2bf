"""Kimi delta attention for PyTorch: functions with the argument meaning of fla.ops.kda, and the decode step on a pool.

    from furlong_ops.kda import chunk_kda, fused_recurrent_kda      # instead of: from fla.ops.kda import ...

Shapes: q, k [B, T, H, K]; v, g [B, T, HV, .]; beta [B, T, HV]; states [N, HV, K, V] fp32. With cu_seqlens, B is 1 and
sequences lie end to end. float16 inputs run in fp32 and come back as float16.
"""

from __future__ import annotations

import torch

from furlong_ops.library import load

_UNSUPPORTED = {
    "return_intermediate_states": "the states between chunks are not part of the operator",
    "cp_context": "context parallelism is done with segment maps, not with this argument",
    "use_graph": "every call can be captured in a graph as it is",
}


def _load() -> None:
    """Loads the library once; under torch.compile it must be loaded before (furlong_ops.load())."""
    if not torch.compiler.is_compiling():
        load()


def _refuse(arguments: dict) -> None:
    for name, reason in _UNSUPPORTED.items():
        if arguments.pop(name, None):
            raise NotImplementedError(f"furlong_ops: {name} is not supported: {reason}")
    # Tuning hints of the other implementation; results do not depend on them.
    for name in ("disable_recompute", "chunk_size", "max_num_seqs", "safe_gate"):
        arguments.pop(name, None)
    if arguments:
        raise TypeError(f"furlong_ops: unknown arguments {sorted(arguments)}")


def _layout(q: torch.Tensor, cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None):
    """Offsets on the device and on the host."""
    B, T = q.shape[:2]
    if cu_seqlens is None:
        # Made where it is needed: a copy would wait for the device and cannot be captured in a CUDA graph.
        return tuple(torch.arange(B + 1, device=where) * T for where in (q.device, "cpu"))
    if B != 1:
        raise ValueError(f"furlong_ops: cu_seqlens needs a batch of 1, got {B}: flatten the sequences first")
    host = cu_seqlens.cpu() if cu_seqlens_cpu is None else cu_seqlens_cpu
    return cu_seqlens.to(torch.long), host.to(torch.long)


def _gate_parameters(g, A_log, dt_bias, lower_bound):
    """A_log [H] and dt_bias [H, K] in fp32; missing ones are zero."""
    H, K = g.shape[1:]
    if A_log is None:
        if lower_bound is None:
            raise ValueError("furlong_ops: A_log is needed when use_gate_in_kernel is set without lower_bound")
        A_log = torch.zeros(H, device=g.device)
    bias = torch.zeros(H, K, device=g.device) if dt_bias is None else dt_bias.float().view(H, K)
    return A_log.float(), bias


def _decay_log(g, A_log, bias, lower_bound):
    """fp32 decay in log space out of [N, H, K]."""
    if A_log is None:
        return g.float()
    if lower_bound is None:
        return torch.ops.furlong.kda_gate_softplus(g, A_log, bias)
    return torch.ops.furlong.kda_gate_bounded(g, A_log, bias, lower_bound)


def _packed(q, k, v, g, beta):
    """[B T, H, .] of all inputs; q and k repeated where value heads share them."""
    H, HV = q.shape[2], v.shape[2]
    if HV % H != 0:
        raise ValueError(f"furlong_ops: {HV} value heads are no multiple of {H} query heads")
    rows = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    if v.dtype == torch.float16:
        rows = [x.float() for x in rows]
    if HV != H:
        rows[:2] = [x.repeat_interleave(HV // H, dim=1) for x in rows[:2]]
    rows[:2] = [x.to(rows[2].dtype) for x in rows[:2]]
    return rows


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    **rest,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fla.ops.kda.chunk_kda. Differentiable in every tensor. Returns (out [B, T, HV, V], final state or None)."""
    _load()
    _refuse(rest)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("furlong_ops: allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    offsets, offsets_host = _layout(q, cu_seqlens, cu_seqlens_cpu)
    if initial_state is not None and state_v_first:
        initial_state = initial_state.transpose(-1, -2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q_, k_, v_, g_, beta_ = _packed(q, k, v, g, beta)
    a_log = bias = None
    if use_gate_in_kernel:
        a_log, bias = _gate_parameters(g_, A_log, dt_bias, lower_bound)
    if use_qk_l2norm_in_kernel and use_gate_in_kernel and use_beta_sigmoid_in_kernel and not allow_neg_eigval:
        out, state = torch.ops.furlong.kda_chunk_fused(
            q_, k_, v_, g_, beta_, a_log, bias, offsets, offsets_host, initial_state, lower_bound or 0.0, scale
        )
    else:
        if use_qk_l2norm_in_kernel:
            q_, k_ = torch.ops.furlong.l2_norm(q_), torch.ops.furlong.l2_norm(k_)
        beta_ = beta_.float()
        if use_beta_sigmoid_in_kernel:
            beta_ = beta_.sigmoid() * (2 if allow_neg_eigval else 1)
        out, state = torch.ops.furlong.kda_chunk(
            q_, k_, v_, _decay_log(g_, a_log, bias, lower_bound), beta_, offsets, offsets_host, initial_state, scale
        )
    if state_v_first:
        state = state.transpose(-1, -2).contiguous()
    return out.view(v.shape).to(v.dtype), state if output_final_state else None


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    **rest,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fla.ops.kda.fused_recurrent_kda; the chunk form runs, which gives the same result to rounding and gradients too.

    For decoding keep the states in a pool and call kda_step_ or kda_step_fused_: those update it in place.
    """
    return chunk_kda(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state, A_log=A_log,
        dt_bias=dt_bias, **rest,
    )  # fmt: skip


def _slots(state: torch.Tensor, slots: torch.Tensor | None, sequences: int) -> torch.Tensor:
    return torch.arange(sequences, device=state.device) if slots is None else slots


def kda_step_(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    slots: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """One token of each of B sequences; slot slots[b] (default b) of the pool `state` [S, H, K, V] is updated in place.

    q, k [B, H, K] are normalised, g [B, H, K] is fp32 in log space, beta [B, H] fp32. Returns [B, H, V].
    """
    _load()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.furlong.kda_step_(q, k, v, g, beta, state, _slots(state, slots, q.shape[0]), scale)


def kda_step_fused_(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = None,
    slots: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """kda_step_ on raw inputs: L2 norm of q and k, the gate of g and beta's sigmoid in one kernel (on CUDA)."""
    _load()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias = dt_bias.view(g.shape[1:])
    return torch.ops.furlong.kda_step_fused_(
        q, k, v, g, beta, A_log, bias, state, _slots(state, slots, q.shape[0]), lower_bound or 0.0, scale
    )
