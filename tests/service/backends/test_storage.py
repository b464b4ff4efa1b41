"""The exchange of two prepared weights: whole, or undone to the bit, wherever it breaks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import gemmwire_service.backends.storage as storage
from gemmwire_service.backends import BACKENDS
from gemmwire_service.backends.base import PreparedWeight
from gemmwire_service.backends.emulation import Emulation, EmulationWeight
from gemmwire_service.backends.storage import Exchange, paired, tensors
from gemmwire_service.errors import BackendError
from gemmwire_service.mxfp8.weight import MxWeight
from oracle import spread

CPU = torch.device("cpu")
PACKED, PLAIN = (256, 256), (64, 96)


def form(shape: tuple[int, int], seed: int, bias: bool = True) -> EmulationWeight:
    n, k = shape
    weight = MxWeight.from_float(spread(n, k, seed=seed), torch.arange(n) / 8 if bias else None)
    return Emulation().prepare(weight, CPU)


def content(form: PreparedWeight) -> list[Tensor]:
    """Copies, in plain order, as bytes."""
    plain = (tensor.to_dense() if tensor.is_mkldnn else tensor for tensor in tensors(form))
    return [tensor.clone().view(torch.uint8) for tensor in plain]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("shape", [PACKED, PLAIN], ids=["packed", "plain"])
@pytest.mark.parametrize("piece", [1 << 10, storage.PIECE], ids=["pieces", "whole"])
def test_the_content_of_two_forms_is_exchanged_and_nothing_moves(
    shape: tuple[int, int], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a piece left out, copied twice or to the wrong place; new storage."""
    monkeypatch.setattr(storage, "PIECE", piece)
    old, new = form(shape, 1), form(shape, 2)
    held, before, after = tensors(old), content(old), content(new)
    assert not same(before, after)
    Exchange(paired(old, new)).run()
    assert same(content(old), after)
    assert same(content(new), before)
    assert all(a is b for a, b in zip(tensors(old), held, strict=True))


@dataclass(frozen=True, eq=False)
class Two(PreparedWeight):
    first: Tensor
    second: Tensor


def two(seed: int) -> Two:
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(0, 256, (40, 8), dtype=torch.uint8, generator=generator) for _ in range(2))
    return Two("two", 40, 8, 40, 8, first, second)


@pytest.mark.parametrize("copies", range(20))
def test_whichever_copy_fails_the_old_content_is_back_to_the_bit(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a weight half old and half new. Two tensors of five pieces are twenty copies."""
    monkeypatch.setattr(storage, "PIECE", 64)
    old, new = two(1), two(2)
    before, real, calls = content(old), Tensor.copy_, iter(range(1000))

    def failing(self: Tensor, source: Tensor) -> Tensor:
        if next(calls) == copies:
            real(self[: len(self) // 2], source[: len(self) // 2])
            raise RuntimeError("copying")
        return real(self, source)

    exchange = Exchange(paired(old, new))
    monkeypatch.setattr(Tensor, "copy_", failing)
    with pytest.raises(RuntimeError, match="copying"):
        exchange.run()
    exchange.undo()
    assert same(content(old), before)
    exchange.undo()
    assert same(content(old), before), "undone twice"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(form((64, 128), 1), id="shape"),
        pytest.param(form(PLAIN, 1, bias=False), id="bias"),
        pytest.param(two(1), id="class"),
    ],
)
def test_forms_that_differ_are_refused(other: PreparedWeight) -> None:
    """Guards: a copy that broadcasts, converts or stops at the shorter of two."""
    with pytest.raises(BackendError, match="weights are replaced in place, which needs the same form"):
        paired(form(PLAIN, 1), other)


@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize("shape", [(130, 384), (300, 512)], ids=str)
def test_every_backend_s_form_can_be_exchanged(name: str, shape: tuple[int, int]) -> None:
    """Guards: a form whose content decides on its layout, or that keeps a part of the weight outside it."""
    n, k = shape
    weights = [MxWeight.from_float(spread(n, k, seed=seed), torch.full((n,), float(seed))) for seed in (1, 2)]
    old, new = (BACKENDS[name]().prepare(weight, CPU) for weight in weights)
    after = content(new)
    Exchange(paired(old, new)).run()
    assert same(content(old), after)
    assert all(not same([a], [b]) for a, b in zip(content(old), content(new), strict=True)), "shared by both"
