"""The choice of a backend: order, binding names, preferences, and reasons for everything passed over."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends import BACKENDS, PRIORITY, select
from gemmwire_service.backends.base import Backend, LayerSpec, Plan, PreparedWeight
from gemmwire_service.errors import BackendError
from gemmwire_service.mxfp8.weight import MxWeight

CPU = torch.device("cpu")
SPEC = LayerSpec("h.0.proj", n=256, k=384, bias=False)
FASTER = PRIORITY[:-1]


class Stub:
    """A backend that answers the two questions and no other."""

    name: ClassVar[str] = "stub"

    def __init__(self, unavailable: str | None = None, k_multiple: int = 1) -> None:
        self._unavailable = unavailable
        self._k_multiple = k_multiple

    def unavailable(self, device: torch.device) -> str | None:
        return self._unavailable

    def rejects(self, spec: LayerSpec) -> str | None:
        if spec.k % self._k_multiple:
            return f"K={spec.k} is not a multiple of {self._k_multiple}"
        return None

    def prepare(self, weight: MxWeight, device: torch.device) -> PreparedWeight:
        raise NotImplementedError

    def plans(self, bucket: int) -> tuple[Plan, ...]:
        raise NotImplementedError

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        raise NotImplementedError


def install(monkeypatch: pytest.MonkeyPatch, **stubs: Backend) -> None:
    for name, stub in stubs.items():
        monkeypatch.setitem(BACKENDS, name, partial(_given, stub))


def _given(stub: Backend) -> Backend:
    return stub


def test_the_order_of_preference() -> None:
    """Guards: a slower backend moved before a faster one."""
    assert PRIORITY == (
        "flashinfer_trtllm",
        "flashinfer_cutedsl",
        "flashinfer_cutlass",
        "cublas",
        "emulation",
    )


def test_auto_on_a_cpu_is_emulation_and_says_why() -> None:
    """Guards: a choice that hides what was passed over."""
    selection = select(SPEC, CPU)
    assert selection.backend.name == "emulation"
    reason = "needs an NVIDIA GPU of compute capability 10.0 or higher, not cpu"
    assert selection.passed_over == tuple((name, reason) for name in FASTER)


def test_every_preference_can_be_made() -> None:
    """Guards: a backend in the order that no entry makes, or one that answers to another name."""
    assert set(PRIORITY) <= set(BACKENDS)
    assert {name: make().name for name, make in BACKENDS.items()} == {name: name for name in BACKENDS}


def test_what_is_not_in_the_order_is_only_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the slower batch-invariant kernels for users who did not ask for them."""
    slower = Stub()
    install(monkeypatch, flashinfer_batch_invariant=slower)
    assert select(SPEC, CPU).backend.name == "emulation"
    assert select(SPEC, CPU, "flashinfer_batch_invariant").backend is slower
    assert select(SPEC, CPU, "cublas,flashinfer_batch_invariant,auto").backend is slower


def test_one_instance_serves_every_layer() -> None:
    """Guards: scratch memory per layer."""
    assert select(SPEC, CPU).backend is select(LayerSpec("other", 1, 33, True), CPU, "emulation").backend


def test_auto_takes_the_first_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: machine and layer not both asked, and an order other than PRIORITY's."""
    cutedsl, cublas = Stub(), Stub()
    install(
        monkeypatch,
        cublas=cublas,
        flashinfer_cutlass=Stub("needs compute capability 10.x, this is 9.0"),
        flashinfer_cutedsl=cutedsl,
        flashinfer_trtllm=Stub(k_multiple=256),
    )
    selection = select(SPEC, CPU)
    assert selection.backend is cutedsl
    assert selection.passed_over == (("flashinfer_trtllm", "K=384 is not a multiple of 256"),)
    assert select(LayerSpec("wide", 256, 512, False), CPU).passed_over == ()


def test_a_name_is_binding_and_its_refusal_shows_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a named backend that warns and runs something else."""
    install(monkeypatch, flashinfer_trtllm=Stub(k_multiple=256), cublas=Stub())
    with pytest.raises(BackendError) as refused:
        select(SPEC, CPU, "flashinfer_trtllm")
    assert str(refused.value) == (
        "layer 'h.0.proj' (N=256, K=384) on cpu with backend 'flashinfer_trtllm': "
        "flashinfer_trtllm: K=384 is not a multiple of 256. cublas, emulation can: name it, or choose auto"
    )
    assert refused.value.expected == ["cublas", "emulation"]
    assert refused.value.got == "flashinfer_trtllm"


def test_a_list_is_a_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a list that is sorted by PRIORITY, or that falls through to what it does not name."""
    cublas = Stub()
    install(monkeypatch, cublas=cublas, flashinfer_trtllm=Stub("no such GPU"))
    selection = select(SPEC, CPU, "flashinfer_trtllm, emulation, cublas")
    assert selection.backend.name == "emulation"
    assert selection.passed_over == (("flashinfer_trtllm", "no such GPU"),)
    assert select(SPEC, CPU, "cublas,emulation").backend is cublas
    with pytest.raises(BackendError, match="flashinfer_cutlass: needs an NVIDIA GPU"):
        select(SPEC, CPU, "flashinfer_trtllm,flashinfer_cutlass")


def test_a_list_may_end_in_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: backends asked, and listed, twice."""
    install(monkeypatch, cublas=Stub("no such GPU"))
    passed_over = [name for name, _ in select(SPEC, CPU, "cublas,auto").passed_over]
    assert passed_over == ["cublas", "flashinfer_trtllm", "flashinfer_cutedsl", "flashinfer_cutlass"]


def test_when_nothing_fits_every_reason_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: an error that names the last backend tried and leaves the user to guess about the others."""
    install(monkeypatch, **{name: Stub(f"{name} is broken") for name in PRIORITY})
    with pytest.raises(BackendError) as refused:
        select(SPEC, CPU)
    message = str(refused.value)
    positions = [message.index(f"{name}: {name} is broken") for name in PRIORITY]
    assert positions == sorted(positions)
    assert message.endswith("no other backend can either")


@pytest.mark.parametrize("choice", ["trtllm", "", "emulation,", "emulation,cutlass"])
def test_an_unknown_name_is_refused_with_the_list(choice: str) -> None:
    """Guards: a misspelled preference that is skipped in silence."""
    with pytest.raises(
        BackendError, match=r"auto, one of flashinfer_trtllm, .*, emulation, emulation_e4m3, or a comma"
    ):
        select(SPEC, CPU, choice)


def test_emulation_says_where_it_does_not_run() -> None:
    """Guards: a device that fails in the first forward instead of at the choice."""
    with pytest.raises(BackendError, match="emulation: runs on cpu and cuda, not on meta"):
        select(SPEC, torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_emulation_needs_the_cuda_it_is_asked_for() -> None:
    """Guards: a CPU build of torch that is found out while weights load."""
    with pytest.raises(BackendError, match="sees no CUDA device here"):
        select(SPEC, torch.device("cuda"), "emulation")


@pytest.mark.parametrize(("n", "k"), [(0, 32), (32, 0)])
def test_emulation_rejects_a_layer_without_elements(n: int, k: int) -> None:
    """Guards: a layer for which prepare or forward divide by nothing."""
    with pytest.raises(BackendError, match=f"emulation: N={n}, K={k}: both have to be at least 1"):
        select(LayerSpec("empty", n, k, False), CPU, "emulation")
