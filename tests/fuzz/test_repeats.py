"""A connection's requests one after another, many of them alike, while what they ask for changes: whatever is
remembered of a connection, each answer is the one of a server that remembers nothing."""

from __future__ import annotations

import random
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from fuzz.effort import while_there_is_time
from http_calls import HEADER_LENGTH, call, json_message, message, raw
from keyed import Drawn, bearer, drawn
from links import answers, request, steady
from oracle import spread
from serving import Served, serving, settings, until

STEPS = 60
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PINNED = tuple(f"/v2/models/m.plain/versions/{version}/infer" for version in (1, 2, 3))
PATHS = (*["/v2/models/m.plain/infer"] * 4, *PINNED)
FORMS = ("binary", "binary", "binary", "raw", "json", "long-json", "all-json")
EXTRAS: tuple[dict[str, Any], ...] = (
    *({}, {}, {"id": "7"}, {"id": "8"}),
    *({"parameters": {"binary_data_output": True, "minimum_version": version}} for version in (1, 2, 4)),
)
FIELDS: tuple[dict[str, str], ...] = (
    {},
    {},
    {"X-Request-Id": "a"},
    {"gemmwire-timeout-us": "60000000"},
    {"Connection": "keep-alive"},
)


@dataclass(frozen=True)
class Kind:
    """All of a request but its key and its numbers."""

    form: str
    rows: int
    dtype: torch.dtype
    path: str
    extra: dict[str, Any]
    fields: dict[str, str]

    def sent(self, x: Tensor, key: str) -> bytes:
        x = x[: self.rows].to(self.dtype)
        fields: dict[str, Any] = {"Authorization": f"Bearer {key}", **self.fields}
        if self.form == "raw":
            return request(raw(x.bfloat16()), 0, path=self.path, **fields)
        if self.form == "binary":
            return request(*message(x, **self.extra), path=self.path, **fields)
        extra = self.extra
        if self.form != "json":  # as long as x itself, where numbers of one digit are
            x = torch.full_like(x, 1.0 + float(x[0, 0] > 0))
            extra = {"parameters": {"binary_data_output": True}} | extra
        body = json_message(x, **extra).replace(b".0", b"").replace(b", ", b",").ljust(x.nbytes)
        if self.form == "all-json":
            fields[HEADER_LENGTH] = f"{len(body):012d}"
        return request(body, path=self.path, **fields)


def kind(chance: random.Random) -> Kind:
    rows = chance.choice((1, 1, 2, 3, 130))
    return Kind(
        chance.choice(FORMS),
        rows,
        chance.choice(DTYPES),
        chance.choice(PATHS),
        chance.choice(EXTRAS),
        chance.choice(FIELDS),
    )


@dataclass
class Pair:
    """Two servers, which are asked and changed alike, and a connection to each."""

    served: tuple[Served, Served]
    keys: Drawn
    links: list[socket.socket] = field(default_factory=list)

    def ask(self, stream: list[bytes], places: list[int]) -> None:
        """Send requests, cut at these places, and compare what comes back."""
        if not self.links:
            self.links = [socket.create_connection(("127.0.0.1", each.port), 20) for each in self.served]
        sent = b"".join(stream)
        told = []
        for link in self.links:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for begin, end in zip([0, *places], [*places, len(sent)], strict=True):
                link.sendall(sent[begin:end])
            told.append([steady(each) for each in answers(link, len(stream))])
        assert told[0] == told[1], sent
        if b"connection: close" in told[0][-1].lower():
            assert [link.recv(1) for link in self.links] == [b"", b""]
            self.close()

    def change(self, method: str, path: str, body: bytes = b"") -> None:
        found = [call(each, method, path, body, bearer(self.keys.admin)).status for each in self.served]
        assert found == [200, 200]

    def refit(self, seed: int) -> None:
        weight = spread(64, 128, seed) / 2**14
        self.change("PUT", "/v2/repository/models/m.plain/weights", save({"weight": weight}))

    def admit(self, with_infer: bool) -> None:
        """Read the key file again, with the key for infer alone or without it."""
        text = self.keys.path.read_text()
        self.keys.path.write_text(
            text.replace("\n#i ", "\ni ") if with_infer else text.replace("\ni ", "\n#i ")
        )
        for each in self.served:
            each.lane.access.reload()

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.links = []


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("repeats")
    (folder / "m").mkdir()
    shutil.copy(checkpoint, folder / "m" / "model.safetensors")
    keys = drawn(folder)
    fields: dict[str, Any] = {"model": (f"m={folder / 'm'}",), "model_root": str(folder), "max_rows": 128}
    with ExitStack() as stack:
        fast, asgi = (
            stack.enter_context(serving(settings(**fields, key_file=str(keys.path), fast_path=path)))
            for path in (True, False)
        )
        found = Pair((fast, asgi), keys)
        stack.callback(found.close)
        yield found


def test_each_answer_is_that_of_a_server_that_remembers_nothing(pair: Pair) -> None:
    seeds = random.Random()

    def walk() -> None:
        seed = seeds.randrange(1 << 30)
        chance = random.Random(seed)
        kinds = [kind(chance) for _ in range(3)]
        try:
            for _ in range(STEPS):
                step(pair, chance, kinds)
        except BaseException as error:
            raise AssertionError(f"of the walk {seed}") from error
        pair.close()
        for each in pair.served:
            until(partial(at_rest, each), "something is counted that is no more")

    while_there_is_time(walk)


def step(pair: Pair, chance: random.Random, kinds: list[Kind]) -> None:
    """A change of what is served, of who may ask or of what is asked; most often some requests."""
    what = chance.randrange(75)
    if what < 2:
        pair.refit(chance.randrange(9))
    elif what == 2:
        pair.change("POST", "/v2/repository/models/m/unload")
        pair.change("POST", "/v2/repository/models/m/load")
    elif what < 5:
        pair.admit(chance.random() < 0.7)
    elif what < 10:
        kinds[chance.randrange(len(kinds))] = kind(chance)
    else:
        x = spread(130, 128, chance.randrange(1 << 20))
        key = pair.keys.infer if chance.random() < 0.9 else pair.keys.both
        one = chance.choice(kinds)
        stream = [one.sent(x.roll(turn, 0), key) for turn in range(chance.choice((1, 1, 1, 1, 2, 3)))]
        length = sum(map(len, stream))
        cuts = chance.choice((0, 0, 0, 1, 2))
        pair.ask(stream, sorted(chance.randrange(1, length) for _ in range(cuts)))


def at_rest(served: Served) -> bool:
    lane, engine = served.lane, served.engine
    counted = (lane.begun, lane.connections, lane.held.total, engine.waiting, engine.waiting_rows)
    return not any(counted)
