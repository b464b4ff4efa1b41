"""The bare ASGI app, sending back what came: the HTTP server alone."""

from __future__ import annotations

from bare_asgi import serve

serve(bytes)
