"""Arrays of a library that the client has never heard of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gemmwire import InputError
from gemmwire.arrays import of_dlpack
from gemmwire.mxfp8 import quantize
from scripted_layer import Computing, N, X, Y, client
from serving import Served


class Foreign:
    """An array of the standard's kind, around one of torch or NumPy."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __dlpack__(self, **named: Any) -> Any:
        return self.held.__dlpack__(**named)

    def __dlpack_device__(self) -> Any:
        return self.held.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        library = torch if isinstance(self.held, torch.Tensor) else np
        return SimpleNamespace(from_dlpack=lambda x: Foreign(library.from_dlpack(x)))


class WithoutWayBack:
    def __dlpack__(self, **named: Any) -> Any:
        return X.__dlpack__(**named)

    def __dlpack_device__(self) -> Any:
        return X.__dlpack_device__()


@pytest.mark.parametrize("shape", [(2, 4), (1, 2, 4), (4,), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_y_is_of_x_s_library(shape: tuple[int, ...], dtype: type) -> None:
    """Guards: a NumPy array as the answer to somebody who has none."""
    held: Any = X.reshape(-1)[: int(np.prod(shape))].reshape(shape).astype(dtype)
    y = client(Computing()).infer("a", Foreign(held))
    assert isinstance(y, Foreign)
    assert (y.held.shape, y.held.dtype) == ((*shape[:-1], N), dtype)
    assert y.held.tolist() == Y.reshape(-1)[: y.held.size].reshape(y.held.shape).tolist()


def test_bfloat16_goes_through_torch() -> None:
    y = client(Computing()).infer("a", Foreign(torch.tensor(X).bfloat16()))
    assert torch.equal(y.held, torch.tensor(Y).bfloat16())


def test_strides_are_followed() -> None:
    y = client(Computing()).infer("a", Foreign(np.asfortranarray(X)[::-1]))
    assert y.held.tolist() == Y[::-1].tolist()


def test_it_can_be_quantized(server: Served) -> None:
    x = np.linspace(-3, 3, 99, dtype=np.float32).reshape(3, 33)
    codes, scales = quantize(Foreign(x))
    expected = quantize(x)
    assert np.array_equal(np.asarray(codes), expected[0])
    assert np.array_equal(np.asarray(scales), expected[1])


def test_a_library_that_y_could_not_go_back_to_is_refused() -> None:
    """Guards: an answer that was computed and cannot be handed out."""
    transport = Computing()
    with pytest.raises(InputError, match=r"names no library that y could go back to.*numpy.from_dlpack\(x\)"):
        client(transport).infer("a", WithoutWayBack())
    assert transport.requests == []


@pytest.mark.parametrize(
    ("held", "words"),
    [
        pytest.param(X.astype(np.float64), "x is float64", id="float64"),
        pytest.param(np.array(1, np.float32), "no dimensions", id="scalar"),
        pytest.param(X.astype(">f4"), "cannot be seen by DLPack", id="byte-order"),
    ],
)
def test_what_is_not_sent_is_refused(held: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        client(Computing()).infer("a", Foreign(held))


def test_bfloat16_that_could_not_come_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_dlpack, "_has_torch", lambda: False)
    with pytest.raises(InputError, match="NumPy passes no bfloat16 on by DLPack"):
        client(Computing()).infer("a", Foreign(X), output_dtype="BF16")
