"""The bare ASGI app, multiplying."""

from __future__ import annotations

from bare_asgi import serve
from gemm import answer

serve(answer)
