"""Arrays of each framework to wire tensors and back: bits, shapes, memory, refusals."""

from __future__ import annotations

import array
import ctypes
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from gemmwire.arrays import datatype_of, framework_of
from gemmwire.errors import InputError, InvalidArgument
from gemmwire.wire import Tensor

Make = Callable[..., Any]

# 24 values that are exact in all three types, no two the same
VALUES = [(-1) ** i * (i + 1) / 8 for i in range(24)]


def numpy_array(dtype: Any) -> Make:
    return lambda *shape: np.array(VALUES[: int(np.prod(shape))], dtype).reshape(shape)


def torch_tensor(dtype: torch.dtype) -> Make:
    return lambda *shape: torch.tensor(VALUES[: int(np.prod(shape))], dtype=dtype).reshape(shape)


KINDS = {
    "numpy-float32": (numpy_array(np.float32), "FP32"),
    "numpy-float16": (numpy_array(np.float16), "FP16"),
    "numpy-bfloat16": (numpy_array(ml_dtypes.bfloat16), "BF16"),
    "torch-float32": (torch_tensor(torch.float32), "FP32"),
    "torch-float16": (torch_tensor(torch.float16), "FP16"),
    "torch-bfloat16": (torch_tensor(torch.bfloat16), "BF16"),
}
every_kind = pytest.mark.parametrize(("make", "datatype"), KINDS.values(), ids=KINDS.keys())


def sent(x: Any) -> Tensor:
    return framework_of(x).to_wire(x, "x")


def received(tensor: Tensor, like: Any) -> Any:
    """The tensor as it comes back: a view of a body that can be written."""
    copy = Tensor("y", tensor.datatype, tensor.shape, memoryview(bytearray(tensor.data)))
    return framework_of(like).from_wire(copy, like)


def bits(values: list[float], datatype: str) -> bytes:
    """The elements as bytes, by way of neither framework's strides."""
    if datatype == "BF16":
        return b"".join(np.float32(value).tobytes()[2:] for value in values)
    return b"".join(np.dtype("f2" if datatype == "FP16" else "f4").type(value).tobytes() for value in values)


def rows(x: Any) -> list[Any]:
    return x.tolist()  # type: ignore[no-any-return]


@every_kind
@pytest.mark.parametrize("shape", [(24,), (2, 12), (2, 3, 4), (1, 24), (2, 0), (0, 5), (2, 0, 3)], ids=str)
def test_an_array_survives_with_its_shape_and_type(make: Make, datatype: str, shape: tuple[int, ...]) -> None:
    """Guards: a rank, an empty batch or a type that does not come back as it went."""
    x = make(*shape)
    tensor = sent(x)
    y = received(tensor, x)

    assert (tensor.datatype, tensor.shape) == (datatype, shape)
    assert bytes(tensor.data) == bits(VALUES[: int(np.prod(shape))], datatype)
    assert (type(y), y.dtype, tuple(y.shape)) == (type(x), x.dtype, shape)
    assert rows(y) == rows(x)
    y[...] = 0  # the caller's to write


@every_kind
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda full: full[:, 1:, :], id="slice-of-the-middle"),
        pytest.param(lambda full: full[::2], id="every-other"),
        pytest.param(lambda full: full[..., 1:3], id="columns"),
        pytest.param(lambda full: full.swapaxes(0, 2), id="transposed"),
        pytest.param(lambda full: full[0].T, id="transposed-matrix"),
        pytest.param(lambda full: full[1, 2], id="vector"),
    ],
)
def test_strides_do_not_change_what_is_sent(make: Make, datatype: str, view: Callable[[Any], Any]) -> None:
    """Guards: the memory behind a view sent as it lies, or a legal view refused."""
    x = view(make(2, 3, 4))
    tensor = sent(x)

    flat = np.array(rows(x), dtype=np.float64).reshape(-1).tolist()
    assert tensor.shape == tuple(x.shape)
    assert bytes(tensor.data) == bits(flat, datatype)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(np.array(VALUES[:6], np.float32)[::-1], id="negative-stride"),
        pytest.param(np.array(VALUES, np.float16).reshape(4, 6, order="F"), id="fortran-order"),
        pytest.param(np.array(VALUES[:4], ">f4"), id="big-endian"),
        pytest.param(np.broadcast_to(np.float32(1.5), (3, 2)), id="broadcast"),
        pytest.param(np.frombuffer(bytes(9), np.uint8)[1:].view(np.float32), id="unaligned-and-read-only"),
    ],
)
def test_numpy_memory_of_any_order_is_sent_row_by_row(x: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Guards: what NumPy allows and a plain copy of the buffer gets wrong."""
    tensor = sent(x)
    little = x.dtype.newbyteorder("<")
    assert bytes(tensor.data) == np.array(x.tolist(), little).tobytes()
    assert received(tensor, x).tolist() == x.tolist()


def test_a_negated_view_of_torch_is_sent_negated() -> None:
    """Guards: the imaginary part of a conjugate, whose memory has the other sign."""
    x = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert x.is_neg()
    assert bytes(sent(x).data) == np.array([-2, 4], "<f4").tobytes()


def test_a_contiguous_array_is_sent_from_its_own_memory() -> None:
    """Guards: a copy of every x; for a model's activations that is most of the client's time."""
    for x in (np.ones((3, 4), np.float32), np.ones((3, 4), ml_dtypes.bfloat16)):
        memory = np.frombuffer(sent(x).data, np.uint8)
        assert np.shares_memory(memory, x)
    for dtype in (torch.float32, torch.bfloat16):
        t = torch.ones(3, 4, dtype=dtype)
        assert np.frombuffer(sent(t).data, np.uint8).ctypes.data == t.data_ptr()
    b = array.array("f", [1, 2])
    memory = np.frombuffer(sent(b).data, np.uint8)
    b[0] = 5
    assert memory.tobytes() == b.tobytes()


def test_y_is_the_memory_that_received_it() -> None:
    """Guards: a copy of every y."""
    body = bytearray(64)
    data = Tensor("y", "FP32", (4, 2), memoryview(body)[32:])
    for like in (np.ones(1, np.float32), torch.ones(1), memoryview(array.array("f", [1]))):
        y = framework_of(like).from_wire(data, like)
        y[0, 0] = 1.0
        assert bytes(body[32:36]) == np.float32(1).tobytes()
        body[:] = bytes(64)


@pytest.mark.parametrize("like", [np.ones(1, np.float32), torch.ones(1)], ids=["numpy", "torch"])
def test_y_is_aligned_and_writable_wherever_it_came_from(like: Any) -> None:
    """Guards: an array at an odd address (from a server that does not pad) or over read-only bytes."""
    values = np.arange(4, dtype="<f4")
    odd = memoryview(bytearray(b"x" + values.tobytes()))[1:]
    for data in (odd, values.tobytes()):
        y = framework_of(like).from_wire(Tensor("y", "FP32", (4,), data), like)
        assert np.asarray(y).flags.aligned
        assert y.tolist() == [0, 1, 2, 3]
        y[0] = 7


def test_an_array_of_ctypes_is_a_buffer() -> None:
    """Guards: a float32 buffer refused because its format names the byte order."""
    row = ctypes.c_float * 2
    x = (row * 2)(row(1, 2), row(3, 4))
    assert (sent(x).shape, bytes(sent(x).data)) == ((2, 2), bytes(x))


def test_a_buffer_comes_back_as_a_buffer() -> None:
    """Guards: NumPy needed for a program that has none of it."""
    x = memoryview(array.array("f", [1, 2, 3, 4])).cast("B").cast("f", (2, 2))
    tensor = sent(x)
    assert (tensor.datatype, tensor.shape, tensor.data) == (
        "FP32",
        (2, 2),
        np.array([1, 2, 3, 4], "<f4").tobytes(),
    )
    y = received(Tensor("y", "FP32", (2, 1), np.array([5, 6], "<f4").tobytes()), x)
    assert (y.format, y.shape, y.tolist()) == ("f", (2, 1), [[5], [6]])

    strided = np.asfortranarray(np.array([[1, 2], [3, 4]], np.float32)).data
    assert bytes(sent(strided).data) == bytes(tensor.data)


REFUSED: dict[str, tuple[Any, str, str]] = {
    "list": ([[1.0]], "type_unsupported", "x is of type list; .* pass numpy.asarray"),
    "none": (None, "type_unsupported", "x is of type NoneType"),
    "python-float": (1.0, "type_unsupported", "x is of type float"),
    "dtype-class": (np.float32, "type_unsupported", "x is of type type"),
    "numpy-float64": (np.ones(2), "dtype_unsupported", r"x is float64; .* pass x.astype\(numpy.float32\)"),
    "numpy-int8": (np.ones(2, np.int8), "dtype_unsupported", "x is int8; float32, float16 or bfloat16"),
    "numpy-bool": (np.ones(2, bool), "dtype_unsupported", "x is bool"),
    "numpy-object": (np.array([None]), "dtype_unsupported", "x is object"),
    "numpy-text": (np.array(["1.5"]), "dtype_unsupported", "x is <U3"),
    "numpy-complex": (np.ones(2, np.complex64), "dtype_unsupported", "x is complex64"),
    "numpy-float8": (np.ones(2, ml_dtypes.float8_e4m3fn), "dtype_unsupported", "x is float8_e4m3fn"),
    "numpy-scalar": (np.float32(1), "rank_unsupported", r"x has no dimensions; \[..., K\] is needed"),
    "numpy-0-d": (np.array(1, np.float32), "rank_unsupported", "x has no dimensions"),
    "numpy-masked": (
        np.ma.masked_array(np.ones(2, np.float32), [False, True]),
        "memory_unsupported",
        "x.filled",
    ),
    "torch-float64": (
        torch.ones(2).double(),
        "dtype_unsupported",
        r"x is torch.float64; .* x.to\(torch.float32\)",
    ),
    "torch-int8": (torch.ones(2, dtype=torch.int8), "dtype_unsupported", "x is torch.int8"),
    "torch-float8": (torch.ones(2).to(torch.float8_e4m3fn), "dtype_unsupported", "x is torch.float8_e4m3fn"),
    "torch-0-d": (torch.tensor(1.0), "rank_unsupported", "x has no dimensions"),
    "torch-sparse": (torch.ones(2).to_sparse(), "memory_unsupported", "layout torch.sparse_coo"),
    "torch-meta": (torch.ones(2, device="meta"), "memory_unsupported", "x is a meta tensor"),
    "torch-with-grad": (torch.ones(2, requires_grad=True), "grad_unsupported", r"pass x.detach\(\)"),
    "bytes": (b"1234", "dtype_unsupported", "a buffer of format 'B', and only float32"),
    "array-of-doubles": (array.array("d", [1]), "dtype_unsupported", "a buffer of format 'd'"),
    "buffer-without-elements": (array.array("f"), "memory_unsupported", "an empty buffer"),
}


@pytest.mark.parametrize(("x", "code", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_sent_is_refused_with_the_way_to_convert(x: Any, code: str, words: str) -> None:
    """Guards: a silent conversion that changes values, and an AttributeError from the depths."""
    with pytest.raises(InputError, match=words) as caught:
        sent(x)
    assert caught.value.code == code
    assert isinstance(caught.value, TypeError)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    """Guards: torch's request to report a bug, for a tensor that has no shape."""
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(InputError, match="x is nested; a dense tensor"):
        sent(x)


def test_a_tensor_that_requires_grad_is_sent_where_no_gradient_is_wanted() -> None:
    """Guards: a model's own parameters refused under no_grad, as in every evaluation."""
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert bytes(sent(x).data) == np.ones(2, "<f4").tobytes()
    assert bytes(sent(x.detach()).data) == np.ones(2, "<f4").tobytes()


@pytest.mark.parametrize(
    ("dtype", "datatype"),
    [
        ("FP32", "FP32"), ("BF16", "BF16"), ("float16", "FP16"), ("torch.bfloat16", "BF16"),
        (np.float32, "FP32"), (np.dtype("float16"), "FP16"), (np.dtype(">f4"), "FP32"),
        (ml_dtypes.bfloat16, "BF16"), (np.dtype(ml_dtypes.bfloat16), "BF16"),
        (torch.float32, "FP32"), (torch.float16, "FP16"), (torch.bfloat16, "BF16"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_dtype_has_many_names(dtype: object, datatype: str) -> None:
    """Guards: output_dtype taken in one spelling only."""
    assert datatype_of(dtype) == datatype


@pytest.mark.parametrize(
    "dtype", ["FP64", "fp32", "", float, np.int8, torch.float64, torch.int8, 3], ids=repr
)
def test_a_dtype_that_y_cannot_have_is_refused(dtype: object) -> None:
    """Guards: float (which is float64 to NumPy) taken for float32."""
    with pytest.raises(InvalidArgument, match="y can be FP32, FP16 or BF16"):
        datatype_of(dtype)


def test_bfloat16_for_numpy_needs_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: an ImportError once the answer is there."""
    x = np.ones(2, np.float32)
    assert framework_of(x).refuse("BF16") is None
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert "pip install ml_dtypes" in str(framework_of(x).refuse("BF16"))
    assert framework_of(x).refuse("FP16") is None


def test_torch_works_without_numpy() -> None:
    """Guards: a torch tensor that takes a detour through NumPy, which this process does not have."""
    program = """
        import sys, warnings

        sys.modules["numpy"] = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
        from gemmwire.arrays import framework_of
        from gemmwire.wire import Tensor

        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.tensor([[1.5, -2.0], [0.25, 8.0]], dtype=dtype).T
            framework = framework_of(x)
            t = framework.to_wire(x, "x")
            y = framework.from_wire(Tensor("y", t.datatype, t.shape, memoryview(bytearray(t.data))), x)
            if not (torch.equal(x, y) and y.dtype == dtype):
                sys.exit(f"{x} became {y}")
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_tensor_without_values_is_refused_and_nothing_is_sent() -> None:
    """Guards: the bytes of whatever lies at address 0 taken for a fake tensor's values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2, 3)
    with pytest.raises(InputError, match="FakeTensor"):
        framework_of(fake).to_wire(fake, "x")

    def inside(row: torch.Tensor) -> torch.Tensor:
        framework_of(row).to_wire(row, "x")
        return row

    with pytest.raises(InputError, match="cannot be read"):
        torch.vmap(inside)(torch.ones(2, 3))
