"""A page of the service: one file without anything from elsewhere, under a policy that lets nothing else run.

It holds no data: what others have named reaches it as JSON, of which it makes text.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from fastapi import Response

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Page:
    """`name` of a file in `web`."""

    def __init__(self, name: str) -> None:
        self._text = (files(__package__) / "web" / name).read_text(encoding="utf-8")
        self._headers = {
            "content-security-policy": policy(self._text),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    def response(self) -> Response:
        return Response(self._text, media_type="text/html", headers=self._headers)


def policy(page: str) -> str:
    """A Content-Security-Policy under which the page's own script and style run, and nothing else does."""
    return "; ".join([*directives(page), "frame-ancestors 'none'"])


def directives(page: str) -> list[str]:
    """Those of the policy that a page itself can state, in a meta element."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = b64encode(sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return [
        "default-src 'none'",
        "script-src " + " ".join(hashes["script"]),
        "style-src " + " ".join(hashes["style"]),
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
