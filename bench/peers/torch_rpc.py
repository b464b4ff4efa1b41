"""torch.distributed.rpc: a process that multiplies, and one that asks it and prints what that takes.

    python torch_rpc.py serve PORT
    python torch_rpc.py ask PORT M K CLIENTS SECONDS     # -> {"times_ms": [...], "per_second": ...}

It has no HTTP, so that both ends are its own. Tensors travel pickled, by a transport of PyTorch's.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import torch
import torch.distributed.rpc as rpc
from gemm import multiply


def join(name: str, rank: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=8)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def ask(m: int, k: int, clients: int, seconds: float) -> list[float]:
    x = torch.randn(m, k).to(torch.bfloat16)
    times: list[float] = []
    end = time.perf_counter() + seconds

    def one() -> None:
        while time.perf_counter() < end:
            began = time.perf_counter()
            rpc.rpc_sync("server", multiply, args=(x,))
            times.append(1e3 * (time.perf_counter() - began))

    threads = [threading.Thread(target=one) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


if __name__ == "__main__":
    role, port = sys.argv[1], int(sys.argv[2])
    join("server" if role == "serve" else "client", 0 if role == "serve" else 1, port)
    if role == "ask":
        m, k, clients, seconds = int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])
        ask(m, k, clients, 0.3)
        times = ask(m, k, clients, seconds)
        print(json.dumps({"times_ms": times, "per_second": len(times) / seconds}))
    rpc.shutdown()
