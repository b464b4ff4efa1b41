"""Ray Serve with raw bytes, one replica."""

from __future__ import annotations

import signal
import sys

from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 1}, max_ongoing_requests=100)
class Linear:
    def __init__(self) -> None:
        from gemm import answer

        self._answer = answer

    async def __call__(self, request: Request) -> Response:
        return Response(self._answer(await request.body()), media_type="application/octet-stream")


if __name__ == "__main__":
    serve.start(http_options={"port": int(sys.argv[1]), "host": "127.0.0.1"})
    serve.run(Linear.bind())
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    serve.shutdown()
