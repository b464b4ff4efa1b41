"""LitServe with base64 in JSON: it hands a request to its worker by pickle, which raw bytes do not survive."""

from __future__ import annotations

import base64
import sys
from typing import Any

import litserve
from gemm import answer


class Linear(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request: dict[str, str]) -> bytes:
        return base64.b64decode(request["x"])

    def predict(self, body: bytes) -> bytes:
        return answer(body)

    def encode_response(self, reply: bytes) -> Any:
        return {"y": base64.b64encode(reply).decode()}


if __name__ == "__main__":
    server = litserve.LitServer(Linear(api_path="/infer"), accelerator="cpu")
    server.run(port=int(sys.argv[1]), log_level="error", generate_client_file=False)
