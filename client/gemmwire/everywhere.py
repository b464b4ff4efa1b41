"""A refit of one layer at each of several servers, without I/O: what came of it at each."""

from __future__ import annotations

from dataclasses import replace

from .errors import GemmwireError, OutOfStep, ServerError, TransportError
from .facts import Refitted


class Everywhere:
    """`took` or `failed` for each server, then `refitted`."""

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._done: dict[str, Refitted] = {}
        self._failed: dict[str, GemmwireError] = {}

    def took(self, url: str, refitted: Refitted) -> None:
        self._done[url] = refitted

    def failed(self, url: str, error: GemmwireError) -> None:
        """Raises the error where it is the first server's and a refusal: nothing has changed anywhere, and
        the others would refuse it too. Not so a refusal after an attempt without an answer, its cause: that
        may have been taken."""
        refused = isinstance(error, ServerError) and error.status < 500 and error.__cause__ is None
        if refused and not (self._done or self._failed):
            raise error
        self._failed[url] = error

    def refitted(self) -> Refitted:
        """The first server's, with `hosts`. Errors: `OutOfStep`."""
        if self._failed:
            raise OutOfStep(self._message(), layer=self._layer, done=self._done, failed=self._failed)
        first = next(iter(self._done.values()))
        return replace(first, hosts=dict(self._done))

    def _message(self) -> str:
        taken = ", ".join(f"{url} (version {each.version})" for url, each in self._done.items())
        failed = "; ".join(
            f"{url}{', which may have them:' if isinstance(error, TransportError) else ':'} {error}"
            for url, error in self._failed.items()
        )
        return (
            f"{len(self._done)} of {len(self._done) + len(self._failed)} servers have the new weights of "
            f"layer {self._layer!r}: {taken or 'none'}. Answers differ by server until all have them, and "
            "their version tells which is which. Send the same weights again without if_version: to all, or "
            f"by a client of their own to those that failed. Failed: {failed}"
        )
