"""What a request asks of a layer: its one input checked against the layer, and how y shall come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from typing import NamedTuple

from gemmwire.wire import ITEMSIZE, Buffer, InferRequest, Shared, Tensor, WireError

from .backends.base import LayerSpec
from .inputs import read_input
from .outputs import DATATYPES, OUTPUT, Columns, read_outputs
from .shm import Region

MINIMUM = "minimum_version"
LONGEST_US = 365 * 24 * 3600 * 1_000_000
_JSON_NUMBER = 16  # bytes of one number of an answer, about


class Call(NamedTuple):
    """x [rows, K] in, y [rows, N] out as `datatype`, within `timeout_us` of its arrival.

    `columns`: the outputs that the answer has, where it is not y alone; `binary`: all of it travels as bytes.
    `targets`: those of them that go to shared memory, and the regions there.
    `minimum`: the oldest version of the weights that may answer, 0 for any.
    `take_back`: of an x that is read in shared memory, to be called once it has been; it may refuse it.
    `in_place`: the bytes behind the JSON part, if there are any, are those of x as they stand.
    """

    x: Tensor
    rows: int
    datatype: str
    binary: bool
    timeout_us: int | None
    id: str
    columns: tuple[Columns, ...] = ()
    in_place: bool = True
    targets: tuple[tuple[Columns, Shared, Region], ...] = ()
    minimum: int = 0
    take_back: Callable[[], None] | None = None

    def deadline(self) -> int | None:
        """Monotonic ns, if it arrived now."""
        return None if self.timeout_us is None else time.monotonic_ns() + self.timeout_us * 1000

    def over(self, data: Buffer) -> Call:
        """The same call of other numbers."""
        x = self.x
        return Call(Tensor(x.name, x.datatype, x.shape, data), *self[1:])  # _replace takes twice as long

    def shape(self, n: int) -> tuple[int, ...]:
        return (*self.x.shape[:-1], n)

    @property
    def is_plain(self) -> bool:
        """Whether the answer is y alone, as bytes in its body."""
        return self.binary and not self.columns

    @property
    def has_place(self) -> bool:
        """Whether the answer is y alone, or all of it goes to shared memory."""
        return len(self.targets) == len(self.columns)

    def width(self, n: int) -> int:
        """Numbers of the answer for each row."""
        return sum(each.stop - each.start for each in self.columns) if self.columns else n


def read_call(request: InferRequest, spec: LayerSpec, timeout_us: int | None) -> Call:
    """Check the request against the layer. Errors: WireError, each naming both sides."""
    _refuse_sequence(request)
    rows = read_input(request, spec)
    x = rows.x
    datatype, columns = read_outputs(request, spec, rows.datatype)
    if datatype not in DATATYPES:
        raise _dtype(f"Output {columns[0].name!r} is asked for as {datatype[:40]!r}", datatype)
    return Call(
        x=x,
        rows=prod(x.shape[:-1]),
        datatype=datatype,
        binary=all(each.binary for each in columns),
        timeout_us=_timeout(request, timeout_us),
        id=request.id,
        in_place=rows.in_place,
        columns=() if _is_y_alone(columns) else columns,
        minimum=_minimum(request),
    )


def _is_y_alone(columns: tuple[Columns, ...]) -> bool:
    return len(columns) == 1 and columns[0].name == OUTPUT and columns[0].shared is None


def refuse_many_rows(rows: int, limit: int) -> None:
    """They are computed as one request, during which others wait."""
    if rows > limit:
        raise WireError(
            "rows_too_many",
            f"x has {rows} rows, the limit is {limit}; send fewer at a time, or raise --max-rows",
            status=413,
            expected=f"<= {limit}",
            got=rows,
        )


def refuse_large_answer(call: Call, spec: LayerSpec, max_body: int, max_json: int) -> None:
    """A small request can ask for a huge answer (N >> K); refuse it before computing it."""
    numbers = call.rows * call.width(spec.n)
    size = numbers * ITEMSIZE[call.datatype]
    if size > max_body:
        raise WireError(
            "answer_too_large",
            f"The answer would have {size} bytes ({call.rows} rows of {call.width(spec.n)} {call.datatype}), "
            f"the limit is {max_body}; send fewer rows at a time, or raise --max-body-bytes",
            status=413,
            expected=f"<= {max_body}",
            got=size,
        )
    if not call.binary and numbers * _JSON_NUMBER > max_json:
        raise WireError(
            "json_too_large",
            f"The answer would hold {numbers} numbers as JSON, more than fit the limit for JSON "
            f"of {max_json} bytes; ask for it in binary (parameters.binary_data), or raise --max-json-bytes",
            status=413,
            expected=f"<= {max_json // _JSON_NUMBER} numbers",
            got=numbers,
        )


def _timeout(request: InferRequest, header_us: int | None) -> int | None:
    timeout = request.parameters.get("timeout", header_us)
    if timeout is None or timeout == 0:
        return None
    if type(timeout) is not int or not 0 < timeout <= LONGEST_US:
        shown = repr(timeout)[:40]
        raise WireError(
            "request_invalid",
            f"Parameter 'timeout' is {shown}; it must be a whole number of microseconds, at most a year's "
            f"{LONGEST_US} (0: no deadline)",
            expected=f"0 to {LONGEST_US}",
            got=shown,
        )
    return timeout


def _minimum(request: InferRequest) -> int:
    minimum = request.parameters.get(MINIMUM, 0)
    if type(minimum) is not int or not 0 <= minimum < 1 << 63:
        shown = repr(minimum)[:40]
        raise WireError(
            "request_invalid",
            f"Parameter {MINIMUM!r} is {shown}; it must be a version of the weights, a whole number (0: any)",
            expected="a version",
            got=shown,
        )
    return minimum


def _refuse_sequence(request: InferRequest) -> None:
    if request.parameters.get("sequence_id"):
        raise WireError("sequence_unsupported", "Layers hold no state between requests; send no sequence_id")


def _dtype(what: str, got: str) -> WireError:
    return WireError(
        "dtype_unsupported",
        f"{what}; a layer takes and gives {', '.join(DATATYPES)}: convert it first",
        expected=list(DATATYPES),
        got=got[:40],
    )
