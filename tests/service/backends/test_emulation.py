"""The emulation against float64, on data that shows a scale read from the wrong place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends import emulation
from gemmwire_service.backends.base import Plan, PreparedWeight
from gemmwire_service.backends.emulation import Emulation, EmulationWeight, Operands, split_bias
from gemmwire_service.buckets import Ladder
from gemmwire_service.errors import BackendError
from gemmwire_service.mxfp8.format import BLOCK, dequantize, quantize
from gemmwire_service.mxfp8.weight import MxWeight
from oracle import assert_same_bits, rounded_once, sparse

CPU = torch.device("cpu")
M = (1, 7, 8, 9, 128, 129, 300)
N = (1, 64, 130, 576)
K = (33, 128, 341, 384)
SHAPES = [(m, n, k) for m in M for n in N for k in K]
TOLERANCE = 2.0**-8  # BF16 rounds by at most 2^-9 of an element; the rest is for FP32 sums
BF16_MAX = (2 - 2**-7) * 2.0**127


def named(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def seeded(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers) % 2**32)


def spread(rows: int, k: int, generator: torch.Generator) -> Tensor:
    """FP32 [rows, k], normal numbers whose blocks differ in exponent, from 2^-12 to 2^11."""
    blocks = -(-k // BLOCK)
    values = torch.randn(rows, blocks, BLOCK, generator=generator)
    exponents = torch.randint(-12, 12, (rows, blocks, 1), generator=generator)
    return torch.ldexp(values, exponents).reshape(rows, -1)[:, :k].contiguous()


def run(x: Tensor, weight: EmulationWeight, backend: Emulation, bucket: int = 0) -> Tensor:
    """x [m, k] -> BF16 [m, n], run at `bucket`, by default the one of m; `out` holds NaN before."""
    m = x.shape[0]
    bucket = bucket or Ladder().bucket_for(m)
    padded = torch.zeros(bucket, weight.k_pad, dtype=torch.bfloat16)
    padded[:m, : weight.k] = x
    out = torch.full((bucket, weight.n_pad), float("nan"), dtype=torch.bfloat16)
    backend.forward(padded, weight, Plan(bucket), out)
    return out[:m, : weight.n]


def forward(x: Tensor, weight: MxWeight) -> Tensor:
    backend = Emulation()
    return run(x, backend.prepare(weight, CPU), backend)


def reference(x: Tensor, weight: MxWeight) -> Tensor:
    """float64 [m, n] of the dequantized operands."""
    padded = torch.nn.functional.pad(x.to(torch.bfloat16), (0, weight.k_pad - x.shape[1]))
    operand = dequantize(*quantize(padded), torch.float64)
    y = operand @ dequantize(weight.codes, weight.scales, torch.float64).T
    return y if weight.bias is None else y + weight.bias.double()


def relative_errors(y: Tensor, expected: Tensor) -> Tensor:
    """||y - expected|| / ||expected|| of each row."""
    error = torch.linalg.vector_norm(y.double() - expected, dim=1)
    return torch.div(error, torch.linalg.vector_norm(expected, dim=1))


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (576, 341), (1024, 512)])
@pytest.mark.parametrize("bucket", [1, 8, 9, 16, 300])
def test_y_in_memory_of_its_own_has_the_same_bits(bucket: int, n: int, k: int, with_bias: bool) -> None:
    """Guards: a bucket whose bits depend on how its forward is asked for; memory that is used again."""
    generator = seeded(bucket, n, k)
    bias = torch.randn(n, generator=generator) if with_bias else None
    backend = Emulation()
    weight = backend.prepare(MxWeight.from_float(spread(n, k, generator), bias), CPU)
    xs = [
        torch.nn.functional.pad(spread(bucket, k, generator), (0, weight.k_pad - k)).bfloat16() for _ in "ab"
    ]
    ys = [backend.product(x, weight, Plan(bucket)) for x in xs]
    for x, y in zip(xs, ys, strict=True):
        out = torch.empty(bucket, weight.n_pad, dtype=torch.bfloat16)
        backend.forward(x, weight, Plan(bucket), out)
        assert_same_bits(y, out)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rows", [1536, 2047])
def test_an_x_beyond_the_caches_is_exact_in_every_part(rows: int) -> None:
    """Guards: parts that overlap, a gap between them, the rows of another part in the scratch."""
    generator = seeded(rows)
    x, w = sparse(rows, 4096, generator), sparse(40, 4096, generator)
    bias = torch.arange(40) / 16
    assert emulation.rows_at_once(torch.empty(1536, 4096)) == 384
    exact = x.double() @ w.double().T + bias.double()
    assert_same_bits(forward(x, MxWeight.from_float(w, bias)), rounded_once(exact))


@pytest.mark.usefixtures("one_thread")
def test_a_row_has_the_same_bits_in_every_part() -> None:
    """Guards: a last part of fewer rows, which another kernel multiplies in another order."""
    x = spread(1, 4096, seeded(1)).expand(2048, -1)
    backend = Emulation()
    y = run(x, backend.prepare(MxWeight.from_float(spread(70, 4096, seeded(2))), CPU), backend)
    assert_same_bits(y, y[:1].expand_as(y))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rows", [1, 512, 513, 2048])
def test_parts_are_equal_and_leave_none_out(rows: int) -> None:
    for k in (32, 4096, 1 << 16):
        at_once = emulation.rows_at_once(torch.empty(rows, k, dtype=torch.bfloat16))
        assert rows % at_once == 0
        assert at_once == rows or at_once * k * 2 > 1 << 21


@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_exact_data_gives_the_exact_result_rounded_once(shape: tuple[int, int, int], with_bias: bool) -> None:
    """Guards: any lost, doubled or misplaced product, a sum kept in BF16, a second rounding."""
    m, n, k = shape
    generator = seeded(m, n, k)
    x, w = sparse(m, k, generator), sparse(n, k, generator)
    bias = torch.randint(-4096, 4097, (n,), generator=generator) / 16 if with_bias else None
    weight = MxWeight.from_float(w, bias)
    exact = x.double() @ w.double().T
    if bias is not None:
        exact += bias.double()
    assert torch.equal(reference(x, weight), exact), "the data has to be exact in MXFP8"
    assert_same_bits(forward(x, weight), rounded_once(exact))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(8, 130, 4096), (16, 130, 4096), (1, 64, 341), (512, 576, 384)], ids=named)
def test_exact_data_on_cuda(shape: tuple[int, int, int]) -> None:
    """Guards: cuBLAS adding the parts of a split K in BF16, which it does for the first two unless told."""
    m, n, k = shape
    generator, backend = seeded(m, n, k), Emulation()
    x, w = sparse(m, k, generator), sparse(n, k, generator)
    weight = backend.prepare(MxWeight.from_float(w, torch.ones(n)), torch.device("cuda"))
    padded = torch.nn.functional.pad(x.to(torch.bfloat16), (0, weight.k_pad - k)).cuda()
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    backend.forward(padded, weight, Plan(m), out)
    assert_same_bits(out.cpu(), rounded_once(x.double() @ w.double().T + 1))


def test_the_exact_data_needs_more_than_bf16() -> None:
    """Guards: an oracle that a sum in BF16 would satisfy too."""
    generator = seeded(1)
    x, w = sparse(64, 384, generator).double(), sparse(64, 384, generator).double()
    exact = x @ w.T
    in_bf16 = torch.zeros(64, 64, dtype=torch.bfloat16)
    for column in range(384):
        in_bf16 += (x[:, column, None] * w[:, column]).to(torch.bfloat16)
    assert (in_bf16 != rounded_once(exact)).float().mean() > 0.25


@pytest.mark.parametrize(
    ("product", "bias", "y"),
    [
        # BF16 has 8 bits: its ulp at 1 is 2^-7 and 1 + 2^-8 a tie that goes to 1. The last part breaks it.
        pytest.param(2.0**-9, 1 + 2.0**-9 + 2.0**-22, 1 + 2.0**-7, id="third-part-breaks-the-tie"),
        pytest.param(2.0**-9, 1 + 2.0**-9, 1.0, id="the-tie-itself"),
        # Without the middle part 1 + 2^-9 + 2^-22 is nearer to 1.
        pytest.param(2.0**-9 + 2.0**-22, 1 + 2.0**-9, 1 + 2.0**-7, id="second-part-makes-the-tie"),
        # The product alone would round to 256, and 256 + 2^-12 to 256 again.
        pytest.param(257.0, 2.0**-12, 258.0, id="product-not-rounded-before"),
        pytest.param(-1.0, 1 + 2.0**-23, 2.0**-23, id="all-24-bits-of-the-bias"),
        pytest.param(0.0, -BF16_MAX, -BF16_MAX, id="largest-bf16"),
        pytest.param(0.0, (2 - 2.0**-23) * 2.0**127, float("inf"), id="largest-fp32-rounds-to-inf"),
    ],
)
def test_an_fp32_bias_is_added_before_the_one_rounding(product: float, bias: float, y: float) -> None:
    """Guards: a bias rounded to BF16, or added to a result that was rounded already."""
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 32] = 1.0, 1.0
    w = torch.zeros(3, 64)
    high = float(
        torch.tensor(product).to(torch.float8_e4m3fn)
    )  # each block of 32 holds 4 bits of the product
    w[1, 0], w[1, 32] = high, product - high
    weight = MxWeight.from_float(w, torch.tensor([0.0, bias, 0.0]))
    assert dequantize(weight.codes, weight.scales, torch.float64)[1].sum().item() == product
    assert forward(x, weight).tolist() == [[0.0, y, 0.0]]


def test_the_parts_of_a_bias_are_bf16_and_add_up_to_it() -> None:
    """Guards: a part that BF16 rounds, for which the sum is another bias."""
    generator = seeded(2)
    bias = torch.ldexp(
        torch.randn(10_000, generator=generator), torch.randint(-90, 120, (10_000,), generator=generator)
    )
    parts = list(split_bias(bias))
    assert all(torch.equal(part.to(torch.bfloat16).float(), part) for part in parts)
    assert torch.equal(sum((part.double() for part in parts), torch.zeros(10_000).double()), bias.double())


@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_rows_of_spread_exponents_are_within_tolerance(shape: tuple[int, int, int]) -> None:
    """Guards: a scale read from another block or row, which data of one magnitude hides."""
    m, n, k = shape
    generator = seeded(m, n, k)
    x = spread(m, k, generator)
    weight = MxWeight.from_float(spread(n, k, generator), torch.randn(n, generator=generator))
    y, expected = forward(x, weight), reference(x, weight)
    assert relative_errors(y, expected).max().item() < TOLERANCE
    if m > 1:
        assert relative_errors(y.T, expected.T).max().item() < TOLERANCE


Mutation = Callable[[Tensor], Tensor]


def permuted(scales: Tensor) -> Tensor:
    return scales.roll(1, dims=0)


def one_row_doubled(scales: Tensor) -> Tensor:
    changed = scales.clone()
    changed[17] += 1
    return changed


def one_block_halved(scales: Tensor) -> Tensor:
    changed = scales.clone()
    loudest = int(changed[17].argmax())
    changed[17, loudest] -= 1
    return changed


@pytest.mark.parametrize("mutate", [permuted, one_row_doubled, one_block_halved], ids=lambda m: m.__name__)
def test_the_oracle_sees_a_wrong_scale(mutate: Mutation) -> None:
    """Guards: the two tests above, which would be worth nothing if they passed for these weights."""
    generator = seeded(3)
    x, w = spread(128, 384, generator), spread(64, 384, generator)
    weight = MxWeight.from_float(w)
    expected = reference(x, weight)
    y = forward(x, replace(weight, scales=mutate(weight.scales)))
    assert relative_errors(y.T, expected.T).max().item() > 8 * TOLERANCE
    exact = MxWeight.from_float(sparse(64, 384, generator))
    x = sparse(128, 384, generator)
    y = forward(x, replace(exact, scales=mutate(exact.scales)))
    assert (y != rounded_once(reference(x, exact))).any()


@pytest.mark.parametrize("k", [33, 341], ids="k{}".format)
def test_columns_that_pad_k_add_nothing(k: int) -> None:
    """Guards: an unpadded K that changes with what lies behind it."""
    generator = seeded(k)
    x, w = spread(9, k, generator), spread(5, k, generator)
    wider = -(-k // BLOCK) * BLOCK
    padded = torch.nn.functional.pad(w, (0, wider - k))
    y = forward(x, MxWeight.from_float(w))
    assert torch.equal(y, forward(torch.nn.functional.pad(x, (0, wider - k)), MxWeight.from_float(padded)))


@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 33), (7, 64, 128), (9, 130, 341), (300, 576, 384)], ids=named)
def test_a_row_that_is_not_finite_is_a_row_of_nan(
    shape: tuple[int, int, int], value: float, with_bias: bool
) -> None:
    """Guards: NaN and Inf that quantize to 448, zeros in W that stop them, rows beside them that change."""
    m, n, k = shape
    generator = seeded(m, n, k)
    x, w = spread(m, k, generator), spread(n, k, generator)
    w[n // 2] = 0.0
    w[:, k // 2] = 0.0
    weight = MxWeight.from_float(w, torch.ones(n) if with_bias else None)
    clean = forward(x, weight)
    x[m // 2, k // 2] = value
    y = forward(x, weight)
    assert y[m // 2].isnan().all()
    others = [row for row in range(m) if row != m // 2]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("bucket", [8, 64, 256], ids="bucket{}".format)
@pytest.mark.parametrize(("n", "k"), [(130, 4096), (64, 341), (576, 384), (1, 33)], ids=str)
def test_a_row_has_the_same_bits_wherever_it_stands_in_a_bucket(n: int, k: int, bucket: int) -> None:
    """Guards: an answer that depends on what else was in the batch."""
    generator = seeded(n, k)
    backend = Emulation()
    weight = backend.prepare(
        MxWeight.from_float(spread(n, k, generator), torch.randn(n, generator=generator)), CPU
    )
    row = spread(1, k, generator)
    alone = run(row, weight, backend, bucket)
    for position in {0, 1, bucket // 2, bucket - 1}:
        x = spread(bucket, k, generator)
        x[position] = row
        assert torch.equal(run(x, weight, backend)[position], alone[0]), f"row {position}"


def test_a_forward_leaves_nothing_behind() -> None:
    """Guards: scratch rows or bias columns of the layer before, among layers of one K, at any bucket."""
    generator, backend = seeded(4), Emulation()
    layers = [
        backend.prepare(MxWeight.from_float(spread(n, 64, generator), bias), CPU)
        for n, bias in [
            (64, None),
            (130, torch.randn(130, generator=generator)),
            (130, None),
            (3, torch.ones(3)),
        ]
    ]
    xs = [spread(m, 64, generator) for m in (8, 1, 7, 128)]
    fresh = [[run(x, layer, Emulation()) for x in xs] for layer in layers]
    poison = torch.full((8, 64), float("nan"))
    for _ in range(2):
        for layer, expected in zip(layers, fresh, strict=True):
            for x, y in zip(xs, expected, strict=True):
                run(poison, layer, backend)
                assert torch.equal(run(x, layer, backend), y)


def test_threads_do_not_share_scratch() -> None:
    """Guards: two servers in one process that overwrite each other's x."""
    generator, backend = seeded(5), Emulation()
    weight = backend.prepare(MxWeight.from_float(spread(64, 1024, generator)), CPU)
    xs = [spread(64, 1024, generator) for _ in range(4)]
    expected = [run(x, weight, backend) for x in xs]

    def repeat(number: int) -> bool:
        return all(torch.equal(run(xs[number], weight, backend), expected[number]) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))


def test_scratch_is_that_of_the_largest_bucket_whatever_came_before_it() -> None:
    """Guards: four times the memory, where a bucket after the other is used for the first time."""
    operands = Operands()
    for bucket in Ladder.dense_up_to(256).buckets:
        operands.rounded(torch.zeros(bucket, 64, dtype=torch.bfloat16), 64, 96)
    kept = {
        scratch.operand.untyped_storage().data_ptr(): scratch.operand.untyped_storage().nbytes()
        for scratch in operands._threads.kept.values()
    }
    assert sum(kept.values()) == 256 * 96 * 2
    first = operands.rounded(torch.ones(1, 64, dtype=torch.bfloat16), 64, 96)
    assert first.untyped_storage().nbytes() == 256 * 96 * 2
    assert first.tolist() == [[1.0] * 96]


def test_inference_mode_and_none_may_alternate() -> None:
    """Guards: scratch made in inference mode, which cannot be written outside it."""
    generator, backend = seeded(6), Emulation()
    x, w = spread(3, 64, generator), MxWeight.from_float(spread(5, 64, generator), torch.ones(5))
    with torch.inference_mode():
        weight = backend.prepare(w, CPU)
        inside = run(x, weight, backend)
    assert torch.equal(run(x, weight, backend), inside)
    with torch.inference_mode():
        assert torch.equal(run(x, weight, backend), inside)


@pytest.mark.parametrize("magnitude", [1e-36, 2.0**-126, 2.0**-133], ids=["1e-36", "2^-126", "2^-133"])
def test_tiny_rows_stay_finite(magnitude: float) -> None:
    """Guards: a reciprocal of a scale that is Inf, and NaN from it."""
    x = torch.full((2, 64), magnitude)
    x[1, 32:] = 0.0
    weight = MxWeight.from_float(torch.ones(3, 64))
    y = forward(x, weight)
    assert y.isfinite().all()
    assert relative_errors(y, reference(x, weight)).nan_to_num().max().item() < TOLERANCE


def test_a_result_beyond_bf16_is_inf() -> None:
    """Guards: an overflow that wraps or saturates in silence."""
    x, weight = (
        torch.full((1, 32), 2.0**100),
        MxWeight.from_float(torch.tensor([[2.0**30], [-(2.0**30)]]).expand(2, 32)),
    )
    assert forward(x, weight).tolist() == [[float("inf"), -float("inf")]]


def weight_of(code: int, scale: int) -> MxWeight:
    codes = torch.zeros(2, 64, dtype=torch.uint8)
    codes[1, 40] = code
    scales = torch.full((2, 2), 127, dtype=torch.uint8)
    scales[1, 1] = scale
    return MxWeight.from_mxfp8(codes.view(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize(
    ("code", "scale"), [(0x78, 247), (0x7E, 247), (0x40, 254), (0xFE, 254)], ids="{}".format
)
def test_a_weight_beyond_bf16_is_refused_with_its_place(code: int, scale: int) -> None:
    """Guards: an Inf in the prepared weight (the first is 256 * 2^120), which makes answers Inf or NaN."""
    with pytest.raises(BackendError, match=r"weight\[1, 40\] is too large for emulation, .* BF16"):
        Emulation().prepare(weight_of(code, scale), CPU)


@pytest.mark.parametrize(
    ("code", "scale"), [(0x77, 247), (0x7E, 246), (0x38, 254), (0xB8, 254)], ids="{}".format
)
def test_the_largest_weights_that_bf16_holds_are_served(code: int, scale: int) -> None:
    """Guards: a refusal by scale byte, where the value would fit."""
    x = torch.zeros(1, 64)
    x[0, 40] = 1.0
    weight = weight_of(code, scale)
    assert forward(x, weight).double().tolist() == reference(x, weight).tolist()


def test_a_foreign_weight_is_a_type_error() -> None:
    """Guards: another backend's shuffled weight read as rows in order."""
    foreign = PreparedWeight("shuffled_128x4", n=128, k=256, n_pad=128, k_pad=256)
    x, out = torch.zeros(1, 256, dtype=torch.bfloat16), torch.zeros(1, 128, dtype=torch.bfloat16)
    with pytest.raises(
        TypeError, match="emulation did not prepare this weight: it is PreparedWeight, shuffled_128x4"
    ):
        Emulation().forward(x, foreign, Plan(1), out)


@pytest.mark.parametrize(
    ("x", "out"), [((2, 64), (1, 3)), ((1, 33), (1, 3)), ((1, 64), (2, 3)), ((1, 64), (1, 4))], ids=str
)
def test_tensors_that_do_not_fit_the_plan_are_refused(x: tuple[int, int], out: tuple[int, int]) -> None:
    """Guards: matmul resizing the output, or rows beyond the bucket left as they were."""
    backend = Emulation()
    weight = backend.prepare(MxWeight.from_float(torch.ones(3, 33)), CPU)
    with pytest.raises(ValueError, match=r"a forward of bucket 1 takes \[1, 64\] and \[1, 3\]"):
        backend.forward(torch.zeros(x).bfloat16(), weight, Plan(1), torch.zeros(out).bfloat16())


def test_the_prepared_weight_says_what_it_is() -> None:
    """Guards: an engine that stages x or slices y by other sizes than the backend's."""
    weight = Emulation().prepare(MxWeight.from_float(torch.ones(3, 33), torch.ones(3)), CPU)
    assert (weight.layout, weight.n, weight.k, weight.n_pad, weight.k_pad) == ("bf16", 3, 33, 3, 64)
    assert (weight.matrix.shape, weight.matrix.dtype) == ((3, 96), torch.bfloat16)
