"""A transport over several servers: each call goes to one that works, and from a lost one to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .balancer import Balancer
from .errors import GemmwireError
from .http1 import Reply, Request
from .rounds import Round, addressed
from .tls import contexts_for
from .transport import HTTPTransport
from .url import Url
from .window import Window

if TYPE_CHECKING:
    import ssl

    from .tls import TLS

# A machine that is gone says nothing; one that is there and lost the first packet is heard after 1 s.
CONNECT_S = 3.0


class Balanced:
    """At most `max_connections` to each server; safe to use from threads. `each` has a transport of each."""

    def __init__(
        self, urls: Sequence[Url], max_connections: int, tls: TLS | ssl.SSLContext | None = None
    ) -> None:
        self._urls = urls
        self._balancer = Balancer(len(urls))
        self._transports = [
            HTTPTransport(url, max_connections, context, CONNECT_S)
            for url, context in zip(urls, contexts_for(urls, tls), strict=True)
        ]
        self.each = {str(one.url): Addressed(one) for one in self._transports}

    def send(self, request: Request, timeout: float | None) -> Reply:
        return self._finish(self._round(request, timeout))

    def send_all(
        self, requests: Sequence[Request], timeout: float | None, at_once: int
    ) -> list[Reply | GemmwireError]:
        rounds = [self._round(request, timeout) for request in requests]
        try:
            with Window(timeout, at_once) as window:
                for round_ in rounds:
                    if (attempt := round_.advance()) is not None:
                        window.add(attempt.request, self._transports[attempt.host], round_.settle)
                window.replies()
        finally:
            for round_ in rounds:
                round_.abandon()
        # What was lost on its way is sent to another host only now, one after the other.
        return [self._outcome(round_) for round_ in rounds]

    def close(self) -> None:
        for transport in self._transports:
            transport.close()

    def _round(self, request: Request, timeout: float | None) -> Round:
        return Round(self._balancer, self._urls, request, timeout)

    def _finish(self, round_: Round) -> Reply:
        try:
            while (attempt := round_.advance()) is not None:
                try:
                    reply = self._transports[attempt.host].send(attempt.request, attempt.timeout)
                except GemmwireError as error:
                    round_.settle(error)
                else:
                    round_.settle(reply)
        finally:
            round_.abandon()
        return round_.result()

    def _outcome(self, round_: Round) -> Reply | GemmwireError:
        try:
            return self._finish(round_)
        except GemmwireError as error:
            return error


class Addressed:
    """The transport of one of several servers, for requests that name none."""

    def __init__(self, transport: HTTPTransport) -> None:
        self._transport = transport

    def send(self, request: Request, timeout: float | None) -> Reply:
        return self._transport.send(addressed(request, self._transport.url), timeout)

    def send_all(
        self, requests: Sequence[Request], timeout: float | None, at_once: int
    ) -> list[Reply | GemmwireError]:
        url = self._transport.url
        return self._transport.send_all([addressed(request, url) for request in requests], timeout, at_once)

    def close(self) -> None:
        self._transport.close()
