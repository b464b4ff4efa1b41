"""BentoML with an array in and out of one worker."""

from __future__ import annotations

import os
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
    serve = [sys.executable, "-m", "bentoml", "serve", "bentoml_raw:Linear", "--host", "127.0.0.1"]
    os.execv(sys.executable, [*serve, "--port", sys.argv[1]])
