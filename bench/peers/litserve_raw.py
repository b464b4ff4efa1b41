"""LitServe with raw bytes."""

from __future__ import annotations

import sys
from typing import Any

import litserve
from fastapi import Request, Response
from gemm import answer


class Linear(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    async def decode_request(self, request: Request) -> bytes:  # type: ignore[override]
        return await request.body()

    def predict(self, body: bytes) -> bytes:
        return answer(body)

    def encode_response(self, reply: bytes) -> Any:
        return Response(reply, media_type="application/octet-stream")


if __name__ == "__main__":
    server = litserve.LitServer(Linear(api_path="/infer"), accelerator="cpu")
    server.run(port=int(sys.argv[1]), log_level="error", generate_client_file=False)
