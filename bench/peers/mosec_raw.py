"""mosec with raw bytes, one worker, batches of up to 8 without a wait."""

from __future__ import annotations

import sys

from gemm import answer
from mosec import Server, Worker


class Linear(Worker):
    def deserialize(self, data: bytes) -> bytes:
        return data

    def serialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes) -> bytes:
        return answer(data)


if __name__ == "__main__":
    sys.argv = [sys.argv[0], "--port", sys.argv[1], "--log-level", "error", "--max-request-size", "67108864"]
    server = Server()
    server.append_worker(Linear, num=1)
    server.run()
