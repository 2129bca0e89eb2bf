"""Furlong's operators for PyTorch: torch.ops.furlong.* and thin functions around them.

    import furlong_ops
    furlong_ops.load()                       # explicit; every function below loads on first use
    from furlong_ops.kda import chunk_kda    # argument meaning of fla.ops.kda.chunk_kda
"""

from furlong_ops.kda import chunk_kda, fused_recurrent_kda, kda_step_, kda_step_fused_
from furlong_ops.library import library_path, load

__all__ = [
    "chunk_kda",
    "fused_recurrent_kda",
    "kda_step_",
    "kda_step_fused_",
    "library_path",
    "load",
]
