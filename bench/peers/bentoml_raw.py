"""BentoML with an array in and out of one worker."""

from __future__ import annotations

import sys
from pathlib import Path

import bentoml


@bentoml.service(workers=1)
class Linear:
    def __init__(self) -> None:
        from gemm import answer

        self._answer = answer

    @bentoml.api(route="/infer")
    def infer(self, file: Path) -> bytes:
        return self._answer(file.read_bytes())


if __name__ == "__main__":
    from bentoml.serving import serve_http

    serve_http(
        "bentoml_raw:Linear", port=int(sys.argv[1]), host="127.0.0.1", working_dir=str(Path(__file__).parent)
    )
