"""Times naive_chunk_kda of flash-linear-attention at chunk 16 on two CPU threads: raw samples as one JSON line.

    naive_kda.py SAMPLES        T 4096, H 8, K = V = 128, fp32

The module is read from its file: the package itself wants Triton.
"""

import importlib.util
import json
import pathlib
import sys
import sysconfig
import time

import torch

torch.set_num_threads(2)
path = pathlib.Path(sysconfig.get_path("purelib")) / "fla/ops/kda/naive.py"
spec = importlib.util.spec_from_file_location("naive_kda_of_fla", path)
naive = importlib.util.module_from_spec(spec)
spec.loader.exec_module(naive)

torch.manual_seed(1)
shape = (1, 4096, 8, 128)
q, k = (torch.nn.functional.normalize(torch.randn(shape), dim=-1) for _ in range(2))
v, g, beta = torch.randn(shape), -5 * torch.rand(shape), torch.rand(shape[:-1])

samples = []
with torch.no_grad():
    for _ in range(int(sys.argv[1])):
        start = time.perf_counter()
        naive.naive_chunk_kda(q, k, v, g, beta, output_final_state=True, chunk_size=16)
        samples.append(time.perf_counter() - start)
print(json.dumps({"naive_chunk_16": samples}))
