"""`gemmwire infer URL LAYER INPUT [-o OUTPUT]`."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gemmwire.arrays import NAMES
from gemmwire.client import Client
from gemmwire.errors import InvalidArgument
from gemmwire.facts import Answer

from . import files
from .dtypes import converted
from .progress import Progress
from .result import Result

_AT_ONCE = 4
_SHOWN = 6  # numbers of y, where it goes into no file


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layer", metavar="LAYER")
    parser.add_argument("input", type=Path, metavar="INPUT", help="x [..., K], a .npy or .safetensors")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="for y [..., N]; the same formats")
    parser.add_argument("--tensor", metavar="NAME", help="of x in a .safetensors that holds several")
    parser.add_argument("--dtype", choices=NAMES, help="convert x to it before it is sent (as in the file)")
    parser.add_argument("--output-dtype", choices=NAMES, help="of y (as x)")
    parser.add_argument("--quantize", choices=("client", "server"), default="server", help="where (server)")
    parser.add_argument("--rows", type=int, default=4096, metavar="M", help="of one request (4096)")


def run(client: Client, options: argparse.Namespace) -> Result:
    """All of y is from one version of the weights."""
    import numpy as np

    if options.rows < 1:
        raise InvalidArgument(f"--rows is {options.rows}; it must be a whole number above 0")
    if options.output is not None:
        files.check_writable(options.output)
    x = files.read(options.input, options.tensor)
    if not x.ndim:
        raise InvalidArgument(f"{options.input}: it holds one number; x [..., K] is needed")
    answers = _answers(client, options, x.reshape(-1, x.shape[-1]) if x.size else x)
    ys = [answer.y for answer in answers]
    y = np.concatenate(ys).reshape(*x.shape[:-1], ys[0].shape[-1])
    if options.output is not None:
        files.write(options.output, "y", y)
    return _result(x, y, answers, options.output)


def _answers(client: Client, options: argparse.Namespace, x: Any) -> list[Answer]:
    """Of some rows after the other, each as an answer of its own."""

    def call(start: int, version: str | None) -> Answer:
        return client.call(
            options.layer,
            converted(x[start : start + options.rows], options.dtype),
            output_dtype=options.output_dtype,
            version=version,
            quantize=options.quantize,
        )

    starts = range(0, len(x), options.rows)
    with Progress(options.layer, len(x), "rows") as progress, ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = [call(0, None)]
        try:
            for answer in pool.map(lambda start: call(start, answers[0].version), starts[1:]):
                answers.append(answer)
                progress.reach(len(answers) * options.rows)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return answers


def _result(x: Any, y: Any, answers: list[Answer], output: Path | None) -> Result:
    first = answers[0]
    document: dict[str, Any] = {
        "x": {"shape": list(x.shape), "dtype": x.dtype.name},
        "y": {"shape": list(y.shape), "dtype": y.dtype.name},
        "version": first.version,
        "backend": first.backend,
        "requests": len(answers),
        "output": None if output is None else str(output),
    }
    text = (
        f"y {list(y.shape)} {y.dtype.name} of x {list(x.shape)} {x.dtype.name}, by {first.backend}, "
        f"version {first.version}, in {len(answers)} request{'s' * (len(answers) > 1)}"
    )
    if output is None:
        document["first"] = [float(number) for number in y.reshape(-1)[:_SHOWN]]
        shown = ", ".join(f"{number:.6g}" for number in document["first"])
        text += f"\ny begins {shown}; -o FILE keeps it"
    else:
        text += f", in {output}"
    return Result(document, text)
