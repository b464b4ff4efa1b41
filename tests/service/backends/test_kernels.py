"""The kernel backends against simulators that compute from the bytes in memory: what they have to answer."""

from __future__ import annotations

import pytest
import torch

from gemmwire_service.backends import BACKENDS, select
from gemmwire_service.backends.base import Backend, LayerSpec, Plan, PreparedWeight
from gemmwire_service.mxfp8.weight import MxWeight
from kernels import (
    CPU,
    FEW_SHAPES,
    KERNELS,
    SHAPES,
    Layer,
    M,
    check_exact,
    check_non_finite,
    check_spread,
    exact_layer,
    spread_layer,
)
from oracle import spread
from sm100 import simulate


@pytest.fixture(params=KERNELS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    simulate(monkeypatch)
    return BACKENDS[request.param]()


@pytest.fixture
def trtllm(monkeypatch: pytest.MonkeyPatch) -> Backend:
    simulate(monkeypatch)
    return BACKENDS["flashinfer_trtllm"]()


def named(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_exact_data_gives_the_exact_result(trtllm: Backend, shape: tuple[int, int]) -> None:
    """Guards: any scale, row, column or bias in the wrong place, in either layout of x's scales."""
    layer = exact_layer(trtllm, *shape, bias=True)
    for m in M:
        check_exact(layer, m, layer.layouts(m))


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("shape", FEW_SHAPES, ids=named)
def test_exact_data_in_every_plan(backend: Backend, shape: tuple[int, int], bias: bool) -> None:
    """Guards: the same, and a quantizer that gives other bytes."""
    layer = exact_layer(backend, *shape, bias)
    for m in M:
        check_exact(layer, m, layer.plans(m))


@pytest.mark.parametrize("shape", FEW_SHAPES, ids=named)
def test_blocks_of_any_exponent(backend: Backend, shape: tuple[int, int]) -> None:
    """Guards: scales of neighbours, which blocks of one magnitude would hide."""
    layer = spread_layer(backend, *shape)
    for m in M:
        check_spread(layer, m, layer.layouts(m))


@pytest.mark.parametrize("shape", [(1, 33), (130, 341), (128, 256)], ids=named)
def test_a_row_that_is_not_finite_is_a_row_of_nan(backend: Backend, shape: tuple[int, int]) -> None:
    """Guards: NaN and Inf that FlashInfer's quantizer turns into 448, and rows that change beside them."""
    layer = spread_layer(backend, *shape)
    for m in M:
        check_non_finite(layer, m, layer.plans(m)[0])


def test_a_bias_does_not_make_a_non_finite_row_finite(backend: Backend) -> None:
    """Guards: the mask applied before the bias, or a bias where NaN belongs."""
    layer = exact_layer(backend, 130, 64, bias=True)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[1, 5] = float("inf")
    y = layer.forward(x, layer.plans(2)[0])
    assert torch.equal(y[0].float(), layer.weight.bias.bfloat16().float())  # type: ignore[union-attr]
    assert y[1].isnan().all()


def test_the_same_bits_wherever_a_row_stands(backend: Backend) -> None:
    """Guards: an answer that depends on what else is in the bucket."""
    layer = spread_layer(backend, 130, 341)
    row = spread(1, 341, seed=5).to(torch.bfloat16)
    for plan in layer.backend.plans(16):
        alone = layer.forward(row, plan)
        x = spread(16, 341, seed=6).to(torch.bfloat16)
        x[11] = row
        assert torch.equal(layer.forward(x, plan)[11], alone[0])


def test_all_plans_of_a_bucket_agree(backend: Backend) -> None:
    """Guards: a timing that changes answers: both quantizers and both layouts give the same bits."""
    layer = spread_layer(backend, 130, 341)
    x = spread(9, 341, seed=9).to(torch.bfloat16)
    first, *others = (layer.forward(x, plan) for plan in layer.plans(9))
    assert all(torch.equal(y, first) for y in others)


def test_a_plan_without_a_layout_is_the_first_guess(backend: Backend) -> None:
    """Guards: a caller that has measured nothing yet."""
    layer = exact_layer(backend, 130, 341, bias=True)
    for m in (1, 300):
        check_exact(layer, m, [Plan(layer.plans(m)[0].bucket)])


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (32, 1024), (130, 384), (2112, 341)], ids=named)
def test_every_layer_is_accepted(backend: Backend, shape: tuple[int, int]) -> None:
    """Guards: what a kernel demands (N and K at least 128, K a multiple of 256) left to the user."""
    spec = LayerSpec("layer", *shape, bias=False)
    assert select(spec, CPU, backend.name).backend is backend
    layer = exact_layer(backend, *shape, bias=False)
    check_exact(layer, 1, layer.layouts(1))


@pytest.mark.parametrize(("n", "k"), [(0, 32), (32, 0)])
def test_a_layer_without_elements_is_rejected(backend: Backend, n: int, k: int) -> None:
    assert backend.rejects(LayerSpec("empty", n, k, False)) == f"N={n}, K={k}: both have to be at least 1"


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_a_prepared_weight_is_one_copy(backend: Backend, bias: bool) -> None:
    """Guards: twice the memory, by the checkpoint's tensors or a temporary that are kept alive."""
    weight = MxWeight.from_float(spread(256, 512), torch.ones(256) if bias else None)
    prepared = backend.prepare(weight, CPU)
    tensors = [value for value in vars(prepared).values() if isinstance(value, torch.Tensor)]
    theirs = {weight.codes.untyped_storage().data_ptr(), weight.scales.untyped_storage().data_ptr()}
    if weight.bias is not None:
        theirs.add(weight.bias.untyped_storage().data_ptr())
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert not theirs & set(sizes)
    assert sum(sizes.values()) == 256 * 512 + 256 * 16 + 4 * 256 * bias


def test_every_backend_refuses_the_weights_of_every_other(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: shuffled rows read as rows in order; forms that look alike and are another's."""
    weight = MxWeight.from_float(spread(128, 256))
    others = [name for name in BACKENDS if name != backend.name]
    assert len(others) == len(BACKENDS) - 1
    for name in others:
        foreign = BACKENDS[name]().prepare(weight, CPU)
        x = torch.zeros(8, foreign.k_pad, dtype=torch.bfloat16)
        out = torch.zeros(8, foreign.n_pad, dtype=torch.bfloat16)
        with pytest.raises(TypeError, match=f"{backend.name} did not prepare this weight: it is"):
            backend.forward(x, foreign, backend.plans(8)[0], out)


def test_a_base_weight_is_refused(backend: Backend) -> None:
    with pytest.raises(TypeError, match="it is PreparedWeight, bf16"):
        backend.forward(
            torch.zeros(1, 256), PreparedWeight("bf16", 1, 1, 128, 256), Plan(1), torch.zeros(1, 128)
        )


@pytest.mark.parametrize(
    ("x", "out"),
    [((2, 256), (1, 128)), ((1, 33), (1, 128)), ((1, 256), (2, 128)), ((1, 256), (1, 3))],
    ids=str,
)
def test_tensors_that_do_not_fit_the_plan_are_refused(
    trtllm: Backend, x: tuple[int, int], out: tuple[int, int]
) -> None:
    """Guards: rows beyond the bucket left as they were, columns of another layer."""
    prepared = trtllm.prepare(MxWeight.from_float(torch.ones(3, 33)), CPU)
    with pytest.raises(ValueError, match=r"a forward of bucket 1 takes \[1, 256\] and \[1, 128\]"):
        trtllm.forward(torch.zeros(x).bfloat16(), prepared, Plan(1), torch.zeros(out).bfloat16())


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in KERNELS for layout in ("linear", "4x8")]
    + [(name, "8x4") for name in KERNELS if name != "flashinfer_trtllm"],
)
def test_a_layout_that_a_kernel_does_not_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, layout: str
) -> None:
    """Guards: FlashInfer's cute-dsl, which takes 8x4 scales without a word and reads them as 128x4."""
    simulate(monkeypatch)
    layer = exact_layer(BACKENDS[name](), 128, 256, bias=False)
    with pytest.raises(ValueError, match=f"reads the scales of x in .*128x4.*, not in {layout}"):
        layer.forward(torch.zeros(1, 256, dtype=torch.bfloat16), Plan(1, layout, "cuda"))


def test_layer_names_the_shape_it_was_made_of(backend: Backend) -> None:
    """Guards: an engine that stages x or slices y by other sizes than the backend's."""
    prepared = Layer.of(backend, MxWeight.from_float(spread(130, 341))).prepared
    k_pad = 512 if backend.name == "flashinfer_trtllm" else 384
    assert (prepared.n, prepared.k, prepared.n_pad, prepared.k_pad) == (130, 341, 256, k_pad)
